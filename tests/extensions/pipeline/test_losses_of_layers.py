"""What layers of a pipeline give `add_loss`, in every stage: means and sums over rows are one device's, all else is told."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from ranks import strategy_on
from training import one_device

import tfdist
from tests.parity.comparison import BatchLogs, assert_same_tree, state
from tests.programs.comparing import on_one_device, run

pytestmark = [pytest.mark.as_traced, pytest.mark.usefixtures("float64")]

ADDED = {
    "mean": lambda x: tf.reduce_mean(tf.square(x)),
    "sum": lambda x: 0.01 * tf.reduce_sum(tf.square(x)),
    "sum_by_constant": lambda x: tf.reduce_sum(tf.abs(x)) / 16.0,
    "sum_by_rows": lambda x: tf.reduce_sum(tf.abs(x)) / tf.cast(tf.shape(x)[0], x.dtype),
    "keras_loss": lambda x: 0.1 * keras.losses.MeanSquaredError()(tf.zeros_like(x), x),
    "weights": lambda x: tf.constant(0.3, x.dtype),
    "none": None,
}
TOLD = {
    "root": lambda x: tf.sqrt(tf.reduce_mean(tf.square(x))),
    "largest": lambda x: tf.reduce_max(x),
}
OPERATIONS = {"root": "Sqrt", "largest": "Max"}


class Adding(keras.layers.Layer):
    def __init__(self, added, **settings):
        super().__init__(**settings)
        self.added = added

    def call(self, x):
        if self.added is not None:
            self.add_loss(self.added(x))
        return x


def model_of(added, schedule):
    inputs = keras.Input((4,))
    hidden = inputs
    for place, function in enumerate(added):
        hidden = keras.layers.Dense(5, "tanh", kernel_regularizer="l2", activity_regularizer="l1")(hidden)
        hidden = Adding(function, name=f"adding_{place}")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    return model if schedule is None else tfdist.PipelineModel(model, num_microbatches=3, **schedule)


def fitted(added, schedule=None, rows=21):
    """Batches of 8 rows: microbatches of 3, 3 and 2, and at last of 2, 2 and 1."""

    def program(strategy):
        with strategy.scope():
            model = model_of(added, schedule)
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        x = np.random.default_rng(2).normal(size=(rows, 4))
        logs = BatchLogs()
        model.fit(x, x[:, :2] ** 2, batch_size=8, shuffle=False, verbose=0, callbacks=[logs])
        return {"logs": logs.train, **state(model), "evaluated": model.evaluate(x, x[:, :2] ** 2, batch_size=8, verbose=0)}

    return program


PAIRS = [("sum", "mean"), ("keras_loss", "sum_by_constant"), ("sum_by_rows", "sum"), ("weights", "keras_loss"), ("none", "sum")]
ALONE = {names: fitted([ADDED[name] for name in names]) for names in PAIRS}


@pytest.mark.parametrize(
    ("names", "schedule", "ranks", "zero_stage"),
    [
        (PAIRS[0], {}, 2, 0),
        (PAIRS[1], {}, 4, 3),
        (PAIRS[2], {"schedule": "interleaved", "stages_per_rank": 2}, 4, 2),
        (PAIRS[3], {"recompute": True}, 4, 0),
        (PAIRS[4], {"schedule": "zero_bubble"}, 2, 3),
        *(exhaustive(names, {}, ranks, zero_stage) for names in PAIRS for ranks in (2, 4) for zero_stage in (1, 3)),
    ],
)
def test_means_and_sums(names, schedule, ranks, zero_stage):
    strategy = strategy_on(ranks, pipeline_parallel_size=2, zero_stage=zero_stage)
    found = run(fitted([ADDED[name] for name in names], schedule), strategy)
    assert_same_tree(found, on_one_device(ALONE[names]))


@pytest.mark.parametrize("names", PAIRS[:2])
def test_in_one_place(names):
    assert_same_tree(run(fitted([ADDED[name] for name in names], {}), one_device()), on_one_device(ALONE[names]))


def test_static_sizes():
    """A number of rows that Python has read counts as the microbatch's."""
    added = [lambda x: tf.reduce_sum(tf.abs(x)) / (x.shape[0] or 1), ADDED["none"]]

    def program(schedule):
        def trained(strategy):
            with strategy.scope():
                model = model_of(added, schedule)
                model.compile(keras.optimizers.SGD(0.1), "mse")
            x = np.random.default_rng(2).normal(size=(24, 4))
            data = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(12, drop_remainder=True)
            model.fit(data, verbose=0)
            return state(model)

        return trained

    found = run(program({}), strategy_on(4, pipeline_parallel_size=2, zero_stage=0))
    assert_same_tree(found, run(program(None), one_device()))


@pytest.mark.parametrize("name", TOLD)
def test_all_else_is_told(name):
    strategy = strategy_on(2, pipeline_parallel_size=2, zero_stage=0)
    with pytest.warns(UserWarning, match=rf"(?s)layer of the pipeline .*{OPERATIONS[name]}.*as an output of the model"):
        run(fitted([TOLD[name], None], {}), strategy)


def test_the_fix_that_is_named():
    """A root of what a layer has made is exact where the model returns that, and its loss computes it."""

    def program(schedule):
        def trained(strategy):
            with strategy.scope():
                inputs = keras.Input((4,))
                hidden = keras.layers.Dense(5, "tanh", name="hidden")(inputs)
                model = keras.Model(inputs, {"out": keras.layers.Dense(2, name="out")(hidden), "hidden": hidden})
                model = model if schedule is None else tfdist.PipelineModel(model, num_microbatches=3)
                model.compile(keras.optimizers.SGD(0.1), {"out": "mse", "hidden": lambda y, x: TOLD["root"](x)})
            x = np.random.default_rng(2).normal(size=(21, 4))
            model.fit(x, {"out": x[:, :2], "hidden": x[:, :1]}, batch_size=8, shuffle=False, verbose=0)
            return state(model)

        return trained

    found = run(program({}), strategy_on(4, pipeline_parallel_size=2, zero_stage=3))
    assert_same_tree(found, run(program(None), one_device()))
