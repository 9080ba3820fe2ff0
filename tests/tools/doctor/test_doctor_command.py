"""`python -m tfdist doctor`: on two logical CPUs, as a user calls it, and what it refuses."""

import json
import os
import sys

import pytest

from tests import forks, workers
from tfdist.runtime.failure import Failure
from tfdist.runtime.rendezvous import WorkerFailedError
from tfdist.tools.doctor import command
from tfdist.tools.doctor import workers as doctors
from tfdist.tools.doctor.command import add_doctor
from tfdist.tools.launch.cli import main

WORKER_CASES = "tests.tools.doctor.worker_checks:examine"


def doctor(*options):
    sys.exit(main(["doctor", *options], [add_doctor]))


@pytest.mark.timeout(300)
def test_a_short_examination(tmp_path):
    files = {"output": tmp_path / "out.txt", "errors": tmp_path / "err.txt"}
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_VAR_secret": "secret", "NCCL_DEBUG": "INFO"}
    options = ["--quick", "--json", "doctor.json"]
    process = forks.start(doctor, *options, environment=environment, folder=tmp_path, **files)
    try:
        assert process.wait(280) == 0, files["output"].read_text() + files["errors"].read_text()
    finally:
        process.kill()
    text, report = files["output"].read_text(), json.loads((tmp_path / "doctor.json").read_text())
    assert report["format"] == 1 and report["holds"] and report["command"] == ["--quick"] and report["advice"] == []
    statuses = {check["name"]: check["workers"][0]["status"] for check in report["checks"]}
    names = ["versions", "topology", "devices"]
    names += [f"bandwidth/{op}" for op in ("reduce_scatter", "all_gather", "all_reduce", "broadcast", "all_to_all", "send")]
    names += [f"parity/zero_stage_{stage}" for stage in range(4)] + ["parity/tensor_parallel_2", "parity/pipeline_2"]
    names += [f"parity/{dtype}" for dtype in ("mixed_float16", "mixed_bfloat16", "tensor_float_32")]
    names += [f"memory/zero_stage_{stage}" for stage in range(4)]
    assert list(statuses) == names
    assert {name for name, status in statuses.items() if status != "holds"} == {"parity/tensor_float_32"}
    data = {check["name"]: check["workers"][0].get("data") for check in report["checks"]}
    assert data["versions"]["environment"]["NCCL_DEBUG"] == "INFO" and "secret" not in json.dumps(report)
    for stage, share in enumerate([16, 12, 10, 8]):  # bytes per parameter on two devices: Adam in float32
        memory = data[f"memory/zero_stage_{stage}"]
        assert memory["formula_bytes"] == share * memory["parameters"]
    assert all(row["bus_gb_per_second"] > 0 for row in data["bandwidth/all_reduce"]["sizes"])
    assert "  transport: TensorFlow's ring within the process, because the devices are CPUs\n" in text
    assert text.endswith("All holds; of 22 checks: 21 hold, 1 left out.\n")
    assert "[22/22] memory/zero_stage_3 ... holds (" in files["errors"].read_text()


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_two_workers_of_which_one_goes_wrong(tmp_path):
    """Also in the middle of collectives: the others learn of it, and all go on with the next check."""
    with workers.job(tmp_path, 2, WORKER_CASES) as job:
        chiefs, others = job.results(280)
    assert chiefs == others, "all workers know the same"
    assert {name: status for name, (status, _) in chiefs.items()} == {
        "devices": "holds",
        "dies": "error",
        "bandwidth/all_reduce": "holds",
        "hangs": "error",
        "raises": "error",
        "parity/zero_stage_3": "holds",
    }
    assert "worker 1: its process was ended by SIGKILL" in chiefs["dies"][1]
    assert "worker 1: still running after" in chiefs["hangs"][1]
    assert "worker_checks.py, line" in chiefs["hangs"][1] and "in hangs" in chiefs["hangs"][1]
    assert "ValueError: no" in chiefs["raises"][1]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_under_the_launcher(tmp_path):
    files = {"output": tmp_path / "out.txt", "errors": tmp_path / "err.txt"}
    options = ["run", "--workers", "2", "--cpu", "-m", "tfdist", "doctor", "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(workers.ROOT)}
    process = forks.start(main, options, environment=environment, folder=tmp_path, **files)
    try:
        process.wait(560)
    finally:
        process.kill()
    lines = files["output"].read_text().splitlines()
    assert all(line.startswith("[worker 0]") for line in lines), "the chief prints"
    assert lines[-1] == "[worker 0] All holds; of 22 checks: 21 hold, 1 left out.", files["errors"].read_text()
    assert any("memory that the workers share" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "0"], "argument --devices: must be a positive integer. Received: 0"),
        (["--logical-gpus", "2", "--devices", "2"], "argument --logical-gpus: cannot be given with --devices"),
        (["--only", "speed"], "argument --only: invalid choice: 'speed'"),
        (["--timeout", "x"], "argument --timeout: must be a number of seconds from 0 to 86400. Received: x"),
        (["--json", "nowhere/x.json"], "argument --json: must be a file in a directory that exists. Received: nowhere/x.json"),
    ],
)
def test_wrong_options(options, message, capsys):
    with pytest.raises(SystemExit) as error:
        doctor(*options)
    assert error.value.code == 2
    assert f"python -m tfdist doctor: error: {message}" in capsys.readouterr().err


def test_all_parts_that_are_asked_for(monkeypatch):
    """However often `--only` is given: the last one alone would leave out what the first asks for, without a word."""
    asked = []
    monkeypatch.setattr(command, "all_checks", lambda parts: asked.extend(parts) or [])
    with pytest.raises(SystemExit) as error:
        doctor("--only", "memory", "--only", "bandwidth", "memory")
    assert error.value.code == 0 and asked == ["memory", "bandwidth"]


def test_devices_belong_to_the_launcher_in_a_job(monkeypatch, capsys):
    config = workers.tf_config(["localhost:1", "localhost:2"], 0)
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(SystemExit) as error:
        doctor("--devices", "2")
    assert error.value.code == 2
    assert "argument --devices: not in a job of several workers" in capsys.readouterr().err
    monkeypatch.setenv("TF_CONFIG", "{")
    with pytest.raises(SystemExit) as error:
        doctor()
    assert error.value.code == 2 and "TF_CONFIG must be JSON" in capsys.readouterr().err


def test_a_worker_that_ends_before_all_have_met_is_told_in_a_line(monkeypatch, capsys):
    def fails(*_):
        raise WorkerFailedError(Failure(1, "failed with exit code 3"))

    monkeypatch.setenv("TF_CONFIG", json.dumps(workers.tf_config(["localhost:1", "localhost:2"], 0)))
    monkeypatch.setattr(doctors, "wait_for_workers", fails)
    with pytest.raises(SystemExit) as error:
        doctor()
    assert error.value.code == 1
    assert capsys.readouterr().err == "tfdist doctor: worker 1 (localhost:2) failed with exit code 3\n"
