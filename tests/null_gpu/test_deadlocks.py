"""What would hang between processes on GPUs: it does where what prevents it is taken out, and does not where it is there."""

import pytest

from tests.null_gpu.running import Machine

pytestmark = pytest.mark.exhaustive


def run(null_gpus, *arguments):
    return null_gpus(Machine(2, timeout_seconds=8), ["-m", "tests.null_gpu.deadlocks", *arguments], 2, 150)


@pytest.mark.parametrize("name", ["circle", "communicators"])
def test_it_would_hang(null_gpus, name):
    ended = run(null_gpus, name, "unguarded")
    assert 87 in ended.codes and not any("ended" in results for results in ended.results), ended.outputs
    errors = ended.log.errors()
    what = "waits in the making of the communicator" if name == "communicators" else "waits in AllReduce of 3 float32, sum"
    assert errors and all(error.startswith("Deadlock: ") and what in error for error in errors)


def test_orders_of_two_processes_that_contradict_each_other_are_refused(null_gpus):
    ended = run(null_gpus, "circle")
    assert not ended.log.errors() and 0 not in ended.codes
    for results, output in zip(ended.results, ended.outputs, strict=True):
        assert "Ranks would wait for each other for ever: rank 0 (worker 0 (" in results.get("refused", output)
        assert "ended" not in results


def test_communicators_are_made_in_one_order(null_gpus):
    ended = run(null_gpus, "communicators")
    assert ended.codes == [0, 0], ended.outputs
    assert all(results == {"ended": True} for results in ended.results)
    assert not ended.log.errors()
