"""Steps of every kind through TensorFlow's GPU runtime and its NCCL path, on null GPUs.

Of each is asked: it ends; all ranks call the same collectives in the same order, which are those of the plan; nothing runs on the
host that belongs to the GPU; nothing is copied between host and device but what `checks.SPECIAL` lists; and no order in which
devices come to their calls could make them wait for each other for ever. Numbers mean nothing there: kernels compute nothing.
"""

import pytest

from tests.null_gpu.checks import circle, problems_of
from tests.null_gpu.hazards import hazards, reused
from tests.null_gpu.running import Machine

# In one process with four GPUs.
ALONE = ["mixed bfloat16, stage 3", "tensor 2, loss scale", "pipeline 2", "fit"]
# In two processes with one GPU each.
TWO = ["stage 3", "pipeline 2"]


def check(null_gpus, names, devices, workers, seconds):
    ended = null_gpus(Machine(devices), ["-m", "tests.null_gpu.program", *names], workers, seconds)
    assert not (problems := problems_of(ended, devices)), "\n".join(problems)
    assert [sorted(results) for results in ended.results] == [sorted(names)] * workers
    assert circle(ended.log) == []
    assert ended.log.calls()
    return ended


def test_one_process(null_gpus):
    check(null_gpus, ALONE, 4, 1, 300)


def test_two_processes(null_gpus):
    """Pipelines hung here: their messages began in an order that each process had for itself."""
    check(null_gpus, TWO, 1, 2, 300)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("devices", "workers", "names"),
    [
        (4, 1, ["stage 0", "stage 1", "stage 2", "stage 3", "accumulation", "loss scale", "tensor 2"]),
        (4, 1, ["clipped", "owners", "tensor 2, stage 3", "pipeline 2, gpipe", "pipeline 2, stage 3"]),
        (4, 1, ["pipeline 2, recomputed", "pipeline 2, tensor 2", "int8, stage 2", "top_k, stage 3", "bfloat16, stage 1"]),
        (4, 1, ["error feedback, stage 0", "error feedback, stage 2", "hybrid, stage 3", "hybrid, stage 2"]),
        (8, 1, ["2 x 2 x 2"]),
        (1, 2, ["stage 0", "stage 1", "stage 2", "clipped", "accumulation", "loss scale", "owners"]),
        (1, 2, ["mixed bfloat16, stage 3", "fit"]),
        (1, 2, ["tensor 2, stage 3", "pipeline 2, gpipe", "pipeline 2, stage 3", "pipeline 2, recomputed", "int8, stage 2"]),
        (
            2,
            2,
            ["stage 3", "tensor 2", "tensor 2, loss scale", "tensor 2, stage 3", "pipeline 2, tensor 2", "pipeline 2, stage 3"],
        ),
        (4, 2, ["2 x 2 x 2", "pipeline 4, tensor 2"]),
        (1, 4, ["pipeline 4", "pipeline 4, interleaved", "pipeline 4, zero bubble", "pipeline 2, stage 3"]),
    ],
)
def test_more_steps(null_gpus, devices, workers, names):
    check(null_gpus, names, devices, workers, 560)


@pytest.mark.exhaustive
def test_what_a_stage_receives_from_another_process_overwrites_nothing_in_use(null_gpus):
    """While messages were broadcasts, 3 of 56 wrote memory that a product queued before was using."""
    machine = Machine(1, bytes=512 << 20, product_us=20_000, message_us=5_000)
    ended = null_gpus(machine, ["-m", "tests.null_gpu.program", "pipeline 2"], 2, 200)
    assert hazards(ended.log) == [] and reused(ended.log)
