"""The doctor on null GPUs: its memory is as the formula says, and GPUs that compute nothing are told."""

import json
import re

import pytest

from tests.null_gpu.running import Machine


@pytest.mark.exhaustive
def test_memory_holds_and_wrong_numbers_do_not(null_gpus, tmp_path):
    file = tmp_path / "doctor.json"
    options = ["--only", "memory", "bandwidth", "--json", str(file)]
    ended = null_gpus(Machine(2, bytes=2 << 30), ["-m", "tfdist", "doctor", *options], 1, 560)
    assert ended.codes == [1], ended.outputs
    report = json.loads(file.read_text())
    checks = {check["name"]: check["workers"][0] for check in report["checks"]}
    for name, check in checks.items():
        if name.startswith("bandwidth"):  # of what has arrived it looks at the numbers
            assert check["status"] == "error" and re.search(r" got \S+ in the place of \d+$", check["summary"]), check
        else:
            assert check["status"] == "holds", check
    assert [device["card"] for device in checks["devices"]["data"]["devices"]] == ["Null GPU"] * 2
    assert checks["devices"]["data"]["transport"] == "NCCL"
    for stage in range(4):
        data = checks[f"memory/zero_stage_{stage}"]["data"]
        assert 0.9 < data["peak_bytes"] / data["formula_bytes"] < 1.3  # by how far the host was ahead: 0.94 to 1.27 was seen
    assert "Not all holds; of 13 checks: 7 hold, 6 with an error." in ended.outputs[0]
