"""Losses that are no means over rows: computed of all microbatches together, all forwards before all backwards."""

import keras
import numpy as np
import pytest
from grids import exhaustive
from ranks import strategy_on
from training import one_device

import tfdist
from tests.parity.comparison import BatchLogs, assert_same_tree, state
from tests.programs.comparing import on_one_device, run
from tfdist.extensions.pipeline import Phase, measure
from tfdist.losses import OverGlobalBatch

pytestmark = [pytest.mark.as_traced, pytest.mark.usefixtures("float64")]

layers, ops = keras.layers, keras.ops
ROWS, CLASSES = 21, 3


def root(y, p):
    """Of a mean of what Keras computes of logits, which the predictions bear."""
    return ops.sqrt(ops.mean(keras.losses.categorical_crossentropy(y, p)))


def model_of(schedule):
    inputs = keras.Input((4,))
    hidden = inputs
    for _ in range(3):
        hidden = layers.Dense(5, "tanh", kernel_regularizer="l2")(hidden)
    outputs = {"kind": layers.Dense(CLASSES, "softmax", name="kind")(hidden), "number": layers.Dense(1, name="number")(hidden)}
    model = keras.Model(inputs, outputs)
    if schedule is not None:
        model = tfdist.PipelineModel(model, num_microbatches=3, **schedule)
    return model


def fitted(schedule, loss=root, **settings):
    """A loss of the batch beside one that is a mean, with batches of uneven microbatches, the last of one row."""

    def program(strategy):
        with strategy.scope():
            model = model_of(schedule)
            losses = {"kind": loss, "number": "mse"}
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), losses, loss_weights={"kind": 2.0, "number": 0.5}, **settings)
        rng = np.random.default_rng(2)
        x = rng.normal(size=(ROWS, 4))
        y = {"kind": np.eye(CLASSES)[rng.integers(0, CLASSES, ROWS)], "number": x[:, :1] ** 2}
        logs = BatchLogs()
        model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0, callbacks=[logs])
        return {"logs": logs.train, **state(model), "evaluated": model.evaluate(x, y, batch_size=10, verbose=0)}

    return program


GRID = [
    ({"schedule": "zero_bubble"}, 4, root),
    exhaustive({"schedule": "1f1b", "recompute": True}, 4, root),
    ({"schedule": "interleaved", "stages_per_rank": 2}, 2, OverGlobalBatch(root)),
    exhaustive({"schedule": "gpipe"}, 4, OverGlobalBatch(root)),
    exhaustive({"schedule": "1f1b", "reshard_after_microbatch": True}, 4, root),
]
alone = {loss: fitted(None, loss) for _, _, loss in (getattr(case, "values", case) for case in GRID)}


@pytest.mark.parametrize(("schedule", "ranks", "loss"), GRID)
def test_they_are_one_devices(schedule, ranks, loss):
    strategy = strategy_on(ranks, pipeline_parallel_size=2, zero_stage=3 if ranks == 4 else 0)
    assert_same_tree(run(fitted(schedule, loss), strategy), on_one_device(alone[loss]))


def test_in_one_place():
    found, expected = (run(fitted(schedule, run_eagerly=True), one_device()) for schedule in ({"schedule": "1f1b"}, None))
    assert_same_tree(found, expected)


@pytest.mark.parametrize(("loss", "is_mean"), [(root, False), ("categorical_crossentropy", True)])
def test_a_mean_keeps_its_schedule(loss, is_mean):
    strategy = strategy_on(2, pipeline_parallel_size=2, zero_stage=0)
    with strategy.scope():
        model = tfdist.PipelineModel([layers.Dense(4), layers.Dense(CLASSES, "softmax")], num_microbatches=3)
        model.build((None, 4))
        model.compile("sgd", loss)
    x = np.ones((6, 4))
    order = [span.action for span in measure(model, x, np.eye(CLASSES)[[0, 1, 2] * 2], runs=1).spans if span.rank == 1]
    phases = [action.phase for action in order]
    assert (order == model.schedule.actions(1)) == is_mean
    assert (phases == [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 3) != is_mean
    assert any("pipeline: " in note for note in strategy.last_plan.notes) != is_mean
