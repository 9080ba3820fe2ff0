"""One null GPU in several parts: `tfdist.use_logical_gpus`, and steps whose ranks talk through TensorFlow's ring."""

import pytest

from tests.null_gpu.running import Machine

MIXED = [f"mixed {dtype}, stage {stage}" for dtype in ("float16", "bfloat16") for stage in range(4)]


def check(null_gpus, monkeypatch, names, parts, workers=1):
    """The cases end on parts of one GPU, none of which NCCL hears of."""
    monkeypatch.setenv("TFDIST_LOGICAL_GPUS", str(parts))
    monkeypatch.setenv("TFDIST_WORKERS_PER_GPU", str(workers))
    ended = null_gpus(Machine(1, bytes=1 << 30), ["-m", "tests.null_gpu.program", *names], workers, 300)
    assert ended.codes == [0] * workers, ended.outputs[0][-3000:]
    for results in ended.results:
        assert sorted(results) == sorted(names)
        assert not {name: result["error"] for name, result in results.items() if "error" in result}
    assert not ended.log.errors() and not ended.log.calls()
    assert {record.name for record in ended.log.of_kind("unknown")} <= {"cuDevicePrimaryCtxRelease_v2"}
    return ended


@pytest.mark.exhaustive
def test_ranks_on_parts_of_one_gpu(null_gpus, monkeypatch):
    ended = check(null_gpus, monkeypatch, ["mixed float16, stage 3"], 2)
    assert all(len(result["peaks"]) == 2 for result in ended.results[0].values())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("parts", "workers", "names"),
    [(4, 1, ["stage 3", "pipeline 2", *MIXED]), (8, 1, ["2 x 2 x 2"]), (2, 2, ["stage 2", "stage 3", *MIXED[::3]])],
)
def test_more_on_parts_of_one_gpu(null_gpus, monkeypatch, parts, workers, names):
    check(null_gpus, monkeypatch, names, parts, workers)


LIMITS = """
import tensorflow as tf
import tfdist
from tests.null_gpu.running import report

free = 1024 * 31 / 32  # MiB
assert tfdist.use_logical_gpus(3) == ["GPU:0", "GPU:1", "GPU:2"]
card = tf.config.list_physical_devices("GPU")[0]
limits = [part.memory_limit for part in tf.config.get_logical_device_configuration(card)]
assert limits == [int(free * 7 / 8 // 3)] * 3, limits
assert len(tf.config.list_logical_devices("GPU")) == 3
assert tfdist.use_logical_gpus(3) == ["GPU:0", "GPU:1", "GPU:2"]
try:
    tfdist.use_logical_gpus(2)
except RuntimeError as error:
    report("late", str(error))
"""


def test_the_parts_are_those_of_what_is_free(null_gpus):
    ended = null_gpus(Machine(2, bytes=1 << 30), ["-c", LIMITS], 1, 120)
    assert ended.codes == [0], ended.outputs[0][-3000:]
    assert "before TensorFlow is initialised; it already runs with 3 GPU device(s)" in ended.results[0]["late"]
