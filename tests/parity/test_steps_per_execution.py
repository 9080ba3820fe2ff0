"""`steps_per_execution` above 1, in `fit`, `evaluate` and `predict`: what one device computes.

Over several workers: tests/parity/test_two_workers.py.
"""

import functools

import keras
import pytest
from grids import exhaustive
from training import BATCH, loss_function, one_device, small, strategy_for, vectors

from tests.parity.comparison import BatchLogs, assert_same_tree, state

pytestmark = pytest.mark.as_traced

X, Y = vectors(56)  # batches of 12, 12, 12, 12 and 8: five steps, of which the last has a batch of its own


def train(strategy, steps_per_execution, infers=True, **settings):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = small()
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            loss_function(),
            metrics=["accuracy"],
            steps_per_execution=steps_per_execution,
            **settings,
        )
    logs = BatchLogs()
    history = model.fit(X, Y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[logs])
    found = {"history": history.history, "after each execution": logs.train, **state(model)}
    if infers:
        found["evaluate"] = model.evaluate(X, Y, batch_size=BATCH, verbose=0)
        found["predict"] = model.predict(X, batch_size=BATCH, verbose=0)
    return found


@functools.cache
def on_one_device(steps_per_execution, infers):
    return train(one_device(), steps_per_execution, infers)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("zero_stage", "devices", "steps", "infers"),
    [(0, 2, 2, False), exhaustive(1, 3, 2, False), exhaustive(2, 2, 3, True), exhaustive(3, 2, 2, True), (3, 3, 7, True)],
)
def test_parity(zero_stage, devices, steps, infers):
    expected = on_one_device(steps, infers)
    assert len(expected["after each execution"]) == -(-5 // steps)
    assert_same_tree(train(strategy_for(devices, zero_stage), steps, infers), expected)


@pytest.mark.timeout(120)
def test_unrolled_and_eager_steps():
    """Keras can unroll the loop; eagerly it is a loop of Python."""

    def unrolled(strategy):
        with strategy.scope():
            model = small()
            model.unrolled_steps_per_execution = 2
            model.compile("sgd", loss_function(), steps_per_execution=4)
        model.set_weights([weight * 0 + 0.01 for weight in model.get_weights()])
        return {**model.fit(X, Y, batch_size=BATCH, verbose=0, shuffle=False).history, **state(model)}

    assert_same_tree(unrolled(strategy_for(2, 3)), unrolled(one_device()))
    assert_same_tree(train(strategy_for(2, 3), 2, run_eagerly=True), on_one_device(2, True))
