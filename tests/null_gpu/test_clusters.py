"""Auto-clustering on GPUs: XLA's clusters stand between the collectives, and no step hangs because of how they were cut.

Null GPUs compile nothing: TensorFlow runs each cluster as a function instead. That waits for what a compiled one would wait for.
"""

import pytest

from tests.null_gpu.checks import circle, problems_of
from tests.null_gpu.running import Machine

FLAGS = "--tf_xla_auto_jit=2 --tf_xla_min_cluster_size=2 --tf_xla_always_defer_compilation=true"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("devices", "workers", "names"),
    [
        (4, 1, ["stage 0", "stage 3", "tensor 2", "pipeline 2"]),
        (1, 2, ["stage 2", "stage 3", "pipeline 2", "pipeline 2, gpipe", "pipeline 2, stage 3"]),
        (1, 4, ["pipeline 4", "pipeline 4, interleaved", "pipeline 4, zero bubble"]),
    ],
)
def test_clusters_between_collectives(null_gpus, monkeypatch, devices, workers, names):
    monkeypatch.setenv("TF_XLA_FLAGS", FLAGS)
    ended = null_gpus(Machine(devices), ["-m", "tests.null_gpu.program", *names], workers, 500)
    assert not (problems := problems_of(ended, devices)), "\n".join(problems)
    assert circle(ended.log) == []
    for results in ended.results:
        assert sorted(results) == sorted(names)
        for result in results.values():
            operations = [operation for operation, _, _ in result["nodes"]]
            assert "_XlaRun" in operations and any(operation.startswith("Collective") for operation in operations)
