"""Batches whose tensors differ in their rows (labelled and unlabelled examples), and penalties where some ranks have no rows."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import CLASSES, FEATURES, vectors

from tests.parity.comparison import state
from tests.programs.comparing import SHARDED, assert_as_on_one_device, stages_in_turns

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(180), pytest.mark.usefixtures("float64")]


class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = keras.layers.Dense(9, activation="tanh"), keras.layers.Dense(CLASSES)
        self.hidden.build((None, FEATURES))
        self.head.build((None, 9))
        self.built = True
        self.tracker = keras.metrics.Mean(name="unlabelled")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def call(self, x):
        return self.head(self.hidden(x))

    @property
    def metrics(self):
        return [self.tracker, self.accuracy]


class SemiSupervised(Model):
    """keras.io's semi-supervised SimCLR in its form, pseudo-labels in its losses: a Keras loss, means and values of rows."""

    def train_step(self, data):
        unlabelled, (labelled, labels) = data
        crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            logits = self(labelled)
            supervised = crossentropy(labels, logits)
            views = self(unlabelled), self(unlabelled * 1.1)
            pseudo = tf.stop_gradient(tf.argmax(views[0], axis=-1))
            consistency = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(pseudo, views[1], from_logits=True))
            all_rows = self.hidden(tf.concat([unlabelled, labelled], axis=0))
            loss = supervised + 0.5 * consistency + 0.1 * tf.reduce_mean(tf.square(all_rows)) + sum(self.losses)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.tracker.update_state(consistency)
        self.accuracy.update_state(labels, logits)
        return {"loss": loss, "supervised": supervised} | {metric.name: metric.result() for metric in self.metrics}


def semi_supervised(unlabelled, labelled, drop_remainder):
    """Three batches of each; those of the last step are smaller."""

    def program(strategy):
        x, y = vectors(3 * unlabelled)
        data = tf.data.Dataset.zip(
            (
                tf.data.Dataset.from_tensor_slices(x[: 3 * unlabelled - unlabelled // 2]).batch(unlabelled, drop_remainder),
                tf.data.Dataset.from_tensor_slices((x, y)).take(3 * labelled - labelled // 2).batch(labelled, drop_remainder),
            )
        )
        with strategy.scope():
            model = SemiSupervised()
            model.compile(keras.optimizers.Adam(0.01))
        history = model.fit(data, epochs=2, verbose=0).history
        return {"history": history, **state(model)}

    return program


@pytest.mark.filterwarnings("ignore:The parts of a batch")
@pytest.mark.parametrize("zero_stage", SHARDED)
@pytest.mark.parametrize(
    ("unlabelled", "labelled", "devices", "drop_remainder"),
    [
        (24, 8, 2, False),
        exhaustive(24, 8, 2, True),
        exhaustive(20, 5, 2, False),  # 3 and 2 units; in the last batch 2 and 1
        exhaustive(12, 8, 3, True),
        exhaustive(10, 7, 2, False),  # one device has all rows
    ],
)
def test_labelled_and_unlabelled_examples(unlabelled, labelled, devices, drop_remainder, zero_stage):
    program = semi_supervised(unlabelled, labelled, drop_remainder)
    assert_as_on_one_device(program, zero_stage, devices)


class Penalized(Model):
    """WGAN-GP's penalty, of every row's gradient, and one of the gradient of the weights, which is that of the whole batch."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            with tf.GradientTape(persistent=True) as inner:
                inner.watch(x)
                scores = self(x)
                mean = tf.reduce_mean(tf.square(scores)) + 0.1 * sum(tf.reduce_sum(tf.square(w)) for w in weights)
            of_rows = tf.sqrt(tf.reduce_sum(tf.square(inner.gradient(scores, x)), axis=1) + 1e-9)
            of_weights = sum(tf.reduce_sum(g**4) for g in inner.gradient(mean, weights))
            loss = mean + tf.reduce_mean(tf.square(of_rows - 1.0)) + tf.sqrt(of_weights)
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss, "penalty": of_weights}


@pytest.mark.filterwarnings("ignore:The loss of Penalized")
@pytest.mark.parametrize("zero_stage", [*map(exhaustive, range(3)), 3])
def test_penalties_of_gradients_where_ranks_have_no_rows(zero_stage):
    """Batches of 3 rows on four devices, and a last one of 1."""
    assert_as_on_one_device(penalized, zero_stage, 4)


def penalized(strategy):
    x, y = vectors(10)
    with strategy.scope():
        model = Penalized()
        model.compile(keras.optimizers.SGD(0.01))
    history = model.fit(x, np.asarray(y), batch_size=3, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, **state(model)}


class Joined(Model):
    """Its losses are of two tensors of rows put together: of both parts of the batch, or of two views of one."""

    loss_of = None

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": tf.reduce_mean(loss)}


def mean_of_both_parts(model, unlabelled, labelled):
    return tf.reduce_mean(tf.square(model(tf.concat([unlabelled, labelled[0]], axis=0))))


def sum_over_both_parts(model, unlabelled, labelled):
    both = model(tf.concat([unlabelled, labelled[0]], axis=0))
    return tf.reduce_sum(tf.square(both)) / both.shape[0]


def mean_of_two_views(model, unlabelled, labelled):
    views = model(keras.ops.concatenate([unlabelled, unlabelled * 1.1], axis=0))
    first, second = keras.ops.split(views, 2, axis=0)
    return keras.ops.mean(keras.ops.square(first - keras.ops.tanh(second))) + 0.1 * keras.ops.mean(keras.ops.square(views))


def value_of_every_row_of_both(model, unlabelled, labelled):
    return 0.05 * tf.reduce_sum(tf.square(model(tf.concat([unlabelled, labelled[0]], axis=0))), axis=-1)


@pytest.mark.parametrize(
    ("loss_of", "zero_stage"),
    [
        *stages_in_turns([mean_of_both_parts, value_of_every_row_of_both]),
        *(exhaustive(loss_of, stage) for loss_of in (sum_over_both_parts, mean_of_two_views) for stage in range(4)),
    ],
)
def test_rows_that_are_put_together_have_a_mean(loss_of, zero_stage):
    """Sizes are known when the step is traced: 12 + 4 rows on each device, or 12 + 12."""
    assert_as_on_one_device(joined(loss_of), zero_stage)


@functools.cache
def joined(loss_of):
    def program(strategy):
        x, y = vectors(72)
        parts = tf.data.Dataset.from_tensor_slices(x), tf.data.Dataset.from_tensor_slices((x, y)).take(24)
        data = tf.data.Dataset.zip((parts[0].batch(24, True), parts[1].batch(8, True)))
        with strategy.scope():
            model = type("JoinedByOne", (Joined,), {"loss_of": loss_of})()
            model.compile(keras.optimizers.SGD(0.01))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            history = model.fit(data, epochs=2, verbose=0).history
        assert not [one for one in told if "rows" in str(one.message)]
        return {"history": history, **state(model)}

    return program
