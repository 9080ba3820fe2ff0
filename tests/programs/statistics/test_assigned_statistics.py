"""What a step assigns to variables of what it has computed of rows: codebooks, queues of keys, counts, running variances, weights
that are trained without an optimizer. A rank has its own rows; what is assigned is what one device computes of all.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops

from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device, stages_in_turns
from tests.programs.fitting import ROWS, adam, momentum

FIT = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def rng():
    return np.random.default_rng(11)


def normal(seed=1):
    return keras.initializers.RandomNormal(seed=seed)


def fitted(strategy, build, compiled=dict, targets=None, rows=ROWS):
    """Fits what `build` makes on five numbers a row."""
    x = rng().normal(size=(rows, 5)).astype("float32")
    with strategy.scope():
        model = build()
        model.compile(**compiled())
    y = x if targets == "inputs" else None if targets is None else rng().normal(size=(rows, targets)).astype("float32")
    history = model.fit(x, y, **FIT).history
    return {"history": history, **state(model)} if model.optimizer is not None else [history, model.get_weights()]


def sgd():
    return {"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "loss": keras.losses.MeanSquaredError()}


def stacked(layer):
    return lambda: keras.Sequential([keras.Input((5,)), layers.Dense(4), layer(), layers.Dense(5)])


class Quantizer(layers.Layer):
    """A codebook that follows what is quantized to it (VQ-VAE with moving averages), by sums or by means."""

    def __init__(self, reduce=ops.sum):
        super().__init__()
        self.reduce = reduce

    def build(self, shape):
        made = {"trainable": False}
        self.code = self.add_weight(name="code", shape=(4, 6), initializer=normal(), **made)
        self.used = self.add_weight(name="used", shape=(6,), initializer="ones", **made)
        self.sums = self.add_weight(name="sums", shape=(4, 6), initializer=normal(), **made)

    def call(self, x, training=False):
        distances = ops.sum(ops.square(self.code), 0) - 2 * x @ self.code
        nearest = ops.one_hot(ops.argmin(distances, 1), 6)
        found = nearest @ ops.transpose(self.code)
        if training:
            count = 1 if self.reduce is ops.sum else ops.cast(ops.shape(x)[0], "float32")
            self.used.assign(0.9 * self.used + 0.1 * self.reduce(nearest, 0))
            self.sums.assign(0.9 * self.sums + 0.1 * (ops.transpose(x) @ nearest) / count)
            self.code.assign(self.sums / (self.used + 1e-3))
        self.add_loss(0.25 * ops.mean(ops.square(ops.stop_gradient(found) - x)))
        return x + ops.stop_gradient(found - x)


def codebook(strategy):
    return fitted(strategy, stacked(Quantizer), adam, "inputs")


def codebook_of_means(strategy):
    return fitted(strategy, stacked(lambda: Quantizer(ops.mean)), adam, "inputs")


class Counts(layers.Layer):
    """Counts of examples, of classes, and the largest input, in every step; read in the same step."""

    def build(self, shape):
        self.rows = self.add_weight(name="rows", shape=(), initializer="zeros", dtype="int64", trainable=False)
        self.classes = self.add_weight(name="classes", shape=(3,), initializer="zeros", trainable=False)
        self.largest = self.add_weight(name="largest", shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.rows.assign_add(ops.cast(ops.shape(x)[0], "int64"))
            self.classes.assign_add(ops.sum(ops.one_hot(ops.argmax(x[:, :3], -1), 3), 0))
            self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(x))))
        return x / (1 + self.largest) * ops.log(1 + ops.cast(self.rows, "float32"))


def counts(strategy):
    return fitted(strategy, stacked(Counts), momentum, 5)


class RunningVariance(layers.Layer):
    """Mean and variance of all rows so far, by Welford's update, and what is standardised by them."""

    def build(self, shape):
        self.mean = self.add_weight(name="mean", shape=shape[1:], initializer="zeros", trainable=False)
        self.variance = self.add_weight(name="variance", shape=shape[1:], initializer="ones", trainable=False)
        self.count = self.add_weight(name="count", shape=(), initializer="ones", trainable=False)

    def call(self, x, training=False):
        if training:
            count = ops.cast(ops.shape(x)[0], "float32")
            total, away = self.count + count, ops.mean(x, 0) - self.mean
            squares = self.variance * self.count + ops.var(x, 0) * count + ops.square(away) * self.count * count / total
            self.mean.assign(self.mean + away * count / total)
            self.variance.assign(squares / total)
            self.count.assign(total)
        return (x - self.mean) / ops.sqrt(self.variance + 1e-5)


def running_variance(strategy):
    return fitted(strategy, stacked(RunningVariance), momentum, 5)


class Contrast(keras.Model):
    """Contrast with a queue of keys of earlier batches, made by a network that follows the other (MoCo)."""

    def __init__(self):
        super().__init__()
        self.network, self.follower = (keras.Sequential([keras.Input((5,)), layers.Dense(4)]) for _ in range(2))
        self.queue = self.add_weight(name="queue", shape=(11, 4), initializer=normal(), trainable=False)
        self.center = self.add_weight(name="center", shape=(1, 4), initializer="zeros", trainable=False)

    def train_step(self, x):
        keys = ops.stop_gradient(ops.normalize(self.follower(x * 0.9) - self.center))
        with tf.GradientTape() as tape:
            found = ops.normalize(self.network(x * 1.1))
            own = ops.sum(found * keys, -1, keepdims=True)
            logits = ops.concatenate([own, found @ ops.transpose(self.queue)], -1) / 0.2
            labels = ops.zeros_like(own[:, 0])
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
        weights = self.network.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for follower, weight in zip(self.follower.weights, weights, strict=True):
            follower.assign(0.9 * follower + 0.1 * weight)
        self.queue.assign(ops.concatenate([keys, self.queue])[:11])
        self.center.assign(0.9 * self.center + 0.1 * ops.mean(keys, 0, keepdims=True))
        return {"loss": loss}


def queue_of_keys(strategy):
    return fitted(strategy, Contrast, sgd)


class Map(keras.Model):
    """A self-organizing map, and a layer by Oja's rule: weights that no optimizer trains."""

    def __init__(self):
        super().__init__()
        self.nodes = self.add_weight(name="nodes", shape=(7, 5), initializer=normal())
        self.dense = layers.Dense(3, use_bias=False)
        self.dense.build((None, 5))

    def train_step(self, x):
        away = x[:, None] - self.nodes
        distances = ops.sum(ops.square(away), -1)
        self.nodes.assign_add(0.5 * ops.mean(ops.one_hot(ops.argmin(distances, -1), 7)[..., None] * away, 0))
        y, kernel, rows = self.dense(x), self.dense.kernel, ops.cast(ops.shape(x)[0], "float32")
        kernel.assign(kernel + 0.1 * (ops.transpose(x) @ y - kernel @ (ops.transpose(y) @ y)) / rows)
        return {"distance": ops.mean(ops.min(distances, -1)), "norm": ops.norm(ops.convert_to_tensor(kernel))}


def weights_without_an_optimizer(strategy):
    return fitted(strategy, Map)


class Best(keras.Model):
    """The sum and the least of the losses, and a loss that is divided by its running mean."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.dense.build((None, 5))
        self.sum, self.least, self.average = (
            self.add_weight(name=name, shape=(), initializer=keras.initializers.Constant(value), trainable=False)
            for name, value in (("sum", 0.0), ("least", 1e9), ("average", 1.0))
        )

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            plain = ops.mean(ops.square(self.dense(x) - y))
            loss = plain / self.average
        self.optimizer.apply(tape.gradient(loss, self.dense.trainable_variables), self.dense.trainable_variables)
        self.average.assign(0.9 * self.average + 0.1 * plain)
        self.sum.assign_add(self.loss(y, self.dense(x)))
        self.least.assign(ops.minimum(self.least, plain))
        return {"loss": loss, "sum": self.sum + 0.0, "least": self.least + 0.0}


def losses_in_variables(strategy):
    return fitted(strategy, Best, sgd, 3)


class CountedInto(layers.Layer):
    """Adds to a table where each row is, one row beside the other."""

    def build(self, shape):
        self.table = self.add_weight(name="table", shape=(shape[-1],), initializer="ones", trainable=False)

    def call(self, x):
        places = tf.argmax(x, -1)[:, None]
        self.table.assign(0.9 * tf.tensor_scatter_nd_add(tf.convert_to_tensor(self.table), places, tf.ones_like(x[:, 0])))
        return x


def counts_into_a_table(strategy):
    return fitted(strategy, stacked(CountedInto), sgd, 5)


class Squares(keras.Model):
    """What is kept of gradients of weights that a loss reads twice: at stage 3 they are gathered twice, a tape adds both up."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((5,)), *[layers.Dense(6, "tanh") for _ in range(4)], layers.Dense(3)])
        self.kept = [
            [self.add_weight(shape=v.shape, initializer="zeros", trainable=False) for v in self.net.trainable_variables]
            for _ in range(3)
        ]

    def train_step(self, data):
        x, y = data
        weights = self.net.trainable_variables
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.net(x) - y)) + tf.add_n([ops.sum((v - 0.1) ** 2) for v in weights])
        grads = tape.gradient(loss, weights)
        for grad, square, largest, average in zip(grads, *self.kept, strict=True):
            square.assign_add(ops.square(grad))
            largest.assign(ops.maximum(largest, ops.abs(grad)))
            average.assign(0.9 * average + 0.1 * grad)
        self.optimizer.apply(grads, weights)
        return {"loss": loss, "norm": tf.linalg.global_norm(grads)}


def squares_of_gradients(strategy):
    return fitted(strategy, Squares, sgd, 3)


def static_batches(strategy):
    """Batches whose size is known: a number of rows is a constant then."""
    x = rng().normal(size=(24, 5)).astype("float32")
    with strategy.scope():
        model = Map()
        model.compile()
    model.fit(tf.data.Dataset.from_tensor_slices(x).batch(6, drop_remainder=True), epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


PROGRAMS = [
    codebook,
    codebook_of_means,
    counts,
    running_variance,
    queue_of_keys,
    weights_without_an_optimizer,
    losses_in_variables,
    counts_into_a_table,
    static_batches,
]
QUICK = (counts, queue_of_keys, weights_without_an_optimizer, counts_into_a_table)


@pytest.mark.as_traced
@pytest.mark.parametrize(
    ("program", "zero_stage"),
    [
        *stages_in_turns(QUICK),
        *stages_in_turns([squares_of_gradients], first=1),
        *(exhaustive(p, stage) for p in PROGRAMS if p not in QUICK for stage in range(4)),
    ],
)
def test_it_is_one_device(program, zero_stage):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_as_on_one_device(program, zero_stage, devices=3 if zero_stage == 2 else 2, rtol=1e-4)


class Looped(layers.Layer):
    """A mean of what a loop has made of each row."""

    def build(self, shape):
        self.mean = self.add_weight(name="mean", shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x):
        self.mean.assign(ops.mean(tf.map_fn(lambda row: 2 * row, x), 0))
        return x


class ToldByPython(layers.Layer):
    """A mean of what Python has made of each row, of which no graph tells that they are rows."""

    def build(self, shape):
        self.mean = self.add_weight(name="mean", shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x):
        doubled = tf.ensure_shape(tf.numpy_function(lambda rows: 2 * rows, [x], x.dtype), x.shape)
        self.mean.assign(ops.mean(doubled, 0))
        return x


def test_what_cannot_be_told_is_warned_of():
    words = r"(?s)told_by_python/mean' is assigned .*`tfdist.collectives.all_gather\(x, uneven=True\)`"
    with pytest.warns(UserWarning, match=words):
        assert_as_on_one_device(told_by_python, 0)


def told_by_python(strategy):
    return fitted(strategy, stacked(lambda: ToldByPython(name="told_by_python")), sgd, 5)


@pytest.mark.as_traced
def test_a_loop_over_rows():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_as_on_one_device(looped, 0)


def looped(strategy):
    return fitted(strategy, stacked(lambda: Looped(name="looped")), sgd, 5)
