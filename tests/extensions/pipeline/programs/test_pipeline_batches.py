"""Pipelines take batches of any size, the last one of an epoch included: weights, losses and metrics are one device's."""

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

layers = keras.layers
ROWS, CLASSES = 27, 3


def features():
    model = [keras.Input((4, 4, 2)), layers.Conv2D(3, 2), layers.MaxPooling2D(2), layers.Flatten()]
    hidden = layers.Dense(5, "tanh", activity_regularizer="l2", kernel_regularizer="l2")
    return keras.Sequential([*model, hidden, layers.Dense(CLASSES)]), np.random.default_rng(0).normal(size=(ROWS, 4, 4, 2))


def normalized():
    model = [keras.Input((4,)), layers.Dense(5), layers.BatchNormalization(), layers.Dense(CLASSES)]
    return keras.Sequential(model), np.random.default_rng(0).normal(size=(ROWS, 4))


def masked():
    tokens = keras.Input((4,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Dense(4, "tanh")(layers.Embedding(6, 3, mask_zero=True)(tokens)))
    return keras.Model(tokens, layers.Dense(CLASSES)(x)), np.random.default_rng(0).integers(0, 6, (ROWS, 4))


def program(build, batch_size, feed, wraps=True, num_microbatches=4, **settings):
    """Returns a program that fits with batches of `batch_size`, of arrays or of a dataset, wrapped or not."""

    def fitted(strategy):
        with strategy.scope():
            model, x = build()
            if wraps:
                model = tfdist.PipelineModel(model, num_microbatches=num_microbatches, **settings)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
        y, weights = np.arange(ROWS) % CLASSES, np.linspace(0.5, 2.0, ROWS)
        logs = BatchLogs()
        keywords = {"verbose": 0, "callbacks": [logs]}
        if feed == "arrays":
            data = (x, y)
            keywords.update(batch_size=batch_size, shuffle=False, sample_weight=weights)
        else:
            data = (tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(batch_size),)
        if feed == "with validation":
            keywords["validation_data"] = data[0]
        history = model.fit(*data, epochs=2, **keywords).history
        return {"history": history, "logs": logs.train, **state(model), "predict": model.predict(x[: batch_size + 1], verbose=0)}

    fitted.__name__ = f"{build.__name__} {batch_size}"
    return fitted


# (model, data ranks, batch size, feed): 27 rows. In batches of 10 the last has 7, of 8 it has 3 for 4 microbatches, of 13, 1.
GRID = [
    (masked, 2, 8, "with validation"),
    exhaustive(features, 1, 10, "arrays"),
    exhaustive(features, 2, 8, "with validation"),
    exhaustive(features, 2, 13, "arrays"),
    exhaustive(features, 1, 13, "with validation"),
    exhaustive(masked, 1, 13, "arrays"),
    exhaustive(masked, 2, 10, "dataset"),
]


@pytest.mark.parametrize(("build", "data_ranks", "batch_size", "feed"), GRID)
def test_it_is_one_device(build, data_ranks, batch_size, feed):
    strategy = strategy_on(2 * data_ranks, pipeline_parallel_size=2, zero_stage=0)
    expected = on_one_device(_plain(build, batch_size, feed))
    assert_same_tree(run(program(build, batch_size, feed), strategy), expected, build.__name__)


_programs = {}


def _plain(build, batch_size, feed):
    return _programs.setdefault((build, batch_size, feed), program(build, batch_size, feed, wraps=False))


@pytest.mark.parametrize(("data_ranks", "batch_size"), [exhaustive(1, 8), exhaustive(1, 13), exhaustive(2, 8)])
def test_statistics_leave_out_what_is_no_row_of_the_batch(data_ranks, batch_size):
    """As one device that is fed the same microbatches, a data rank's at a time; and what is nowhere is in no moving mean."""
    wrapped = program(normalized, batch_size, "arrays", stages=[2])
    found = run(wrapped, strategy_on(2 * data_ranks, pipeline_parallel_size=2, zero_stage=0))
    expected = run(wrapped, strategy_on(data_ranks, zero_stage=0) if data_ranks > 1 else one_device())
    assert np.all([np.isfinite(weight).all() for weight in expected["weights"]])
    assert_same_tree(found, expected, "normalized")


def test_a_microbatch_without_rows_moves_no_statistics():
    """3 rows in 4 microbatches are 3 in 3: where the size is known, and where it is not."""

    def moving(num_microbatches, known):
        keras.utils.set_random_seed(1)
        model, x = normalized()
        model = tfdist.PipelineModel(model, num_microbatches=num_microbatches)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        dataset = tf.data.Dataset.from_tensor_slices((x[:3], np.arange(3))).batch(3, drop_remainder=known)
        model.fit(dataset, verbose=0)
        return model.get_weights()

    expected = moving(3, known=True)
    for known in (True, False):
        assert_same_tree(moving(4, known), expected)


def saturated(name):
    """Returns a program whose outputs are probabilities that are 0 or 1 when rounded: the loss must be that of their logits."""

    def fitted(strategy, wraps=False):
        outputs, loss = {
            "softmax": (CLASSES, "sparse_categorical_crossentropy"),
            "sigmoid": (1, "binary_crossentropy"),
        }[name]
        with strategy.scope():
            large = keras.initializers.RandomNormal(stddev=300.0)
            head = layers.Dense(outputs, name, kernel_initializer=large)
            model = keras.Sequential([keras.Input((4,)), layers.Dense(5), head])
            model = tfdist.PipelineModel(model, num_microbatches=2) if wraps else model
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
        x, y = np.random.default_rng(0).normal(size=(ROWS, 4)), np.arange(ROWS) % (2 if outputs == 1 else 3)
        feeds = [(x, y), (x[:24], y[:24])]  # with rows that are known when a step is traced, and without
        losses = []
        for feed, drops in zip(feeds, (False, True), strict=True):
            dataset = tf.data.Dataset.from_tensor_slices(feed).batch(8, drop_remainder=drops)
            losses.append(model.fit(dataset, verbose=0).history["loss"][0])
            losses.append(model.evaluate(dataset, verbose=0))
        assert max(losses) > 20, "probabilities are not clipped: an empty comparison"
        return {"losses": losses, **state(model)}

    return fitted


@pytest.mark.parametrize("name", ["softmax", exhaustive("sigmoid")])
def test_losses_of_probabilities_are_those_of_their_logits(name):
    def wrapped(strategy):
        return saturated(name)(strategy, wraps=True)

    found = run(wrapped, strategy_on(2, pipeline_parallel_size=2, zero_stage=0))
    assert_same_tree(found, run(saturated(name), one_device()))
