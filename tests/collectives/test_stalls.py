"""A step on one machine that never ends is ended, and names what waits; one that computes or waits for its data is not."""

import gc
import os
import threading
import time
import weakref

import pytest
import tensorflow as tf
from training import strategy_for

import tfdist
from tests import forks
from tfdist.collectives import stalls

pytestmark = pytest.mark.timeout(120)


def step_of(strategy, python):
    """A step in which the second rank calls `python`, before both send."""

    @tf.function
    def step(x):
        def of_rank(x):
            if tfdist.collectives.current_program().rank == 1:
                x = tf.ensure_shape(tf.py_function(python, [x], tf.float32), [])
            return tfdist.collectives.all_reduce(x, "data", label="both/ranks")

        return strategy.run(of_rank, args=(x,))

    return lambda x=1.0: strategy.experimental_local_results(step(tf.constant(x)))[0].numpy()


def ended(way):
    """In a process of its own, whose collectives fail from then on."""
    stalls._GRACE_SECONDS = 2.0
    strategy = tfdist.ShardedStrategy(tfdist.use_logical_cpus(2), step_timeout_seconds=1)
    goes_on = threading.Event()
    step = step_of(strategy, lambda x: (goes_on.wait(), x)[1])
    if way == "returns":  # behind the wait
        threading.Thread(target=lambda: (time.sleep(8), goes_on.set()), daemon=True).start()
    try:
        step()
    except RuntimeError as error:
        print(f"raised: {error}")


@pytest.mark.parametrize("way", ["returns", "never"])
def test_python_code_that_does_not_return(way, tmp_path):
    output = tmp_path / "output"
    child = forks.start(ended, way, environment=dict(os.environ), folder=tmp_path, output=output)
    try:
        code = child.wait(60)
    finally:
        child.kill()
    said = output.read_text()
    assert code == (0 if way == "returns" else 1), said
    assert ("raised: A step has waited for 1 s" if way == "returns" else "tfdist: A step has waited for 1 s") in said
    assert "EagerPyFunc" in said and "test_stalls.py" in said
    assert "Collective_both_ranks on CPU:0, replica_1/Collective_both_ranks on CPU:1 wait for " in said


def test_what_goes_on():
    """A step that computes for longer than that, and data that come later."""

    def busy(x):
        end = time.monotonic() + 3
        while time.monotonic() < end:
            pass
        return x

    def slow():
        for _ in range(2):
            time.sleep(3)
            yield 1.0

    strategy = strategy_for(2, 0, step_timeout_seconds=1)
    assert step_of(strategy, busy)() == 2
    iterator = iter(tf.data.Dataset.from_generator(slow, output_signature=tf.TensorSpec([])))

    @tf.function
    def step():
        x = next(iterator)
        return strategy.run(lambda: tfdist.collectives.all_reduce(x, "data"))

    assert strategy.experimental_local_results(step())[0].numpy() == 2


def test_a_call_that_was_looked_at_keeps_no_graph():
    """It would keep what the function has captured: a model that nobody has any more, and its memory."""
    graphs = []

    def look(x):
        time.sleep(2.5)
        return x

    @tf.function
    def step(x):
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        return strategy.run(
            lambda: tfdist.collectives.all_reduce(tf.ensure_shape(tf.py_function(look, [x], tf.float32), []), "data")
        )

    strategy = strategy_for(2, 0)
    step(tf.constant(1.0))
    del step
    gc.collect()
    assert graphs[0]() is None


@pytest.mark.parametrize("value", [0, -1.0, True, "600"])
def test_a_limit_that_is_none(value):
    with pytest.raises(ValueError, match="`step_timeout_seconds` must be a positive number of seconds"):
        tfdist.ShardedStrategy(["CPU:0"], step_timeout_seconds=value)
