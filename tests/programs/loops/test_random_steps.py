"""Steps that are drawn: several losses, tapes, optimizers, branches, numbers of all rows, batches; each as on one device.

What is drawn follows from the case's number. To see one: `describe(number)`.
"""

import functools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from training import strategy_for

from tests.parity.comparison import BatchLogs, assert_same_tree, state
from tests.programs.comparing import on_one_device, run

pytestmark = [pytest.mark.as_traced, pytest.mark.usefixtures("float64"), pytest.mark.timeout(240)]

FEATURES, TOKENS, CLASSES, BATCH = 4, 3, 5, 6
ROWS = {"even": 12, "uneven": 11, "one row": 7, "small": 8}


class Drawn:
    """What a case is made of."""

    def __init__(self, number):
        draw = random.Random(number)
        self.form = draw.choice(list(ROWS))
        self.devices = draw.choice([2, 2, 3, 4])
        self.stage = draw.choice([0, 1, 2, 3, 3])
        self.is_static = draw.random() < 0.2
        self.instructions = [self.instruction(draw) for _ in range(draw.randint(1, 4))]
        self.seed = draw.randrange(1000)

    def instruction(self, draw):
        kinds = ["step"] * 5 + ["count", "metric", "statistic"]
        kind = draw.choice(kinds)
        if kind != "step":
            return (kind,)
        losses = tuple(draw.choice(list(LOSSES)) for _ in range(draw.choice([1, 1, 2])))
        weights = draw.choice(["all", "all", "first", "last"])
        optimizer = draw.choice([0, 0, 1])
        way = draw.choice(["apply", "apply", "apply", "branch", "scaled", "norm", "persistent"])
        return (kind, losses, weights, optimizer, way)


def describe(number):
    return vars(Drawn(number))


def of_tokens(model, p, y, tokens):
    """A value for each token, as Keras's loss without a reduction returns them."""
    return tf.reduce_mean(model.each_token(tokens, tf.nn.softmax(tf.reshape(p, [-1, TOKENS, CLASSES]))))


def ratio(model, p, y, tokens):
    return tf.reduce_sum((p - y) ** 2) / (1.0 + tf.reduce_sum(tf.abs(y)))


def centred(model, p, y, tokens):
    return tf.reduce_mean((p - tf.reduce_mean(p, 0)) ** 2) + tf.reduce_mean((p - y) ** 2)


def counted(model, p, y, tokens):
    return tf.reduce_mean((p - y) ** 2) / (1.0 + 0.1 * tf.cast(model.count, p.dtype))


LOSSES = {
    "keras mean": lambda model, p, y, tokens: model.squares(y, p),
    "tokens": of_tokens,
    "mean": lambda model, p, y, tokens: tf.reduce_mean((p - y) ** 2),
    "root": lambda model, p, y, tokens: tf.sqrt(tf.reduce_mean((p - y) ** 2)),
    "ratio": ratio,
    "centred": centred,
    "counted": counted,
    "weights": lambda model, p, y, tokens: tf.add_n([tf.reduce_sum(v.value**2) for v in model.first.trainable_variables]),
}


class Random(keras.Model):
    def __init__(self, drawn):
        super().__init__()
        self.drawn = drawn
        seed = functools.partial(keras.initializers.GlorotUniform, seed=drawn.seed)
        self.first = keras.layers.Dense(7, "tanh", kernel_initializer=seed())
        self.last = keras.layers.Dense(TOKENS * CLASSES, kernel_initializer=seed())
        self.first.build((None, FEATURES))
        self.last.build((None, 7))
        self.count = self.add_weight(name="count", shape=(), dtype="int64", initializer="zeros", trainable=False)
        self.average = self.add_weight(name="average", shape=(), initializer="ones", trainable=False)
        self.each_token = keras.losses.SparseCategoricalCrossentropy(reduction=None)
        self.squares = keras.losses.MeanSquaredError()
        self.mean = keras.metrics.Mean(name="mean_of_all")
        self.optimizers = [keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.Adam(0.01)]
        self.built = True

    def call(self, x):
        return self.last(self.first(x))

    def weights_of(self, which):
        return {"all": self.trainable_variables, "first": self.first.trainable_variables}.get(
            which, self.last.trainable_variables
        )

    def train_step(self, data):
        x, y, tokens = data
        logs, p = {}, self(x)
        for place, (kind, *how) in enumerate(self.drawn.instructions):
            if kind == "count":
                self.count.assign_add(1)
            elif kind == "metric":
                self.mean.update_state(tf.reduce_mean((p - y) ** 2, -1))
            elif kind == "statistic":
                self.average.assign(0.9 * self.average + 0.1 * tf.reduce_mean(p))
            else:
                logs[f"loss_{place}"] = self.take_step(x, y, tokens, *how)
        return {**logs, "mean_of_all": self.mean.result()}

    def take_step(self, x, y, tokens, losses, which, number, way):
        weights, optimizer = self.weights_of(which), self.optimizers[number]
        with tf.GradientTape(persistent=way == "persistent") as tape:
            p = self(x)
            values = [LOSSES[name](self, p, y, tokens) for name in losses]
            loss = tf.add_n(values)
        if way == "persistent":
            parts = [tape.gradient(value, weights) for value in values]
            grads = [
                tf.add_n([g for g in of_one if g is not None] or [tf.zeros(w.shape, w.dtype)])
                for *of_one, w in zip(*parts, weights, strict=True)
            ]
        else:
            grads = [
                tf.zeros(w.shape, w.dtype) if g is None else g for g, w in zip(tape.gradient(loss, weights), weights, strict=True)
            ]
        if way == "scaled":
            grads = [g / (1.0 + loss) for g in grads]
        if way == "norm":
            grads, _ = tf.clip_by_global_norm(grads, 0.5)
        if way == "branch":
            tf.cond(loss > 0.5, lambda: optimizer.apply(grads, weights), lambda: None)
        else:
            optimizer.apply(grads, weights)
        return loss


def program_of(drawn):
    def program(strategy):
        rng = np.random.default_rng(drawn.seed)
        rows = ROWS[drawn.form]
        x, y = rng.normal(size=(rows, FEATURES)), rng.normal(size=(rows, TOKENS * CLASSES))
        tokens = rng.integers(0, CLASSES, size=(rows, TOKENS))
        with strategy.scope():
            model = Random(drawn)
            model.compile(model.optimizers[0])
            for optimizer in model.optimizers:
                optimizer.build(model.trainable_variables)
        data = tf.data.Dataset.from_tensor_slices(((x, y, tokens),)).map(lambda one: one)
        logs = BatchLogs()
        data = data.batch(BATCH, drop_remainder=drawn.is_static)
        model.fit(data, epochs=2, verbose=0, callbacks=[logs])
        slots = [variable.numpy() for optimizer in model.optimizers for variable in optimizer.variables]
        return {"logs": logs.train, **state(model), "all slots": slots}

    program.__name__ = str(vars(drawn))
    return program


def assert_case(drawn):
    program = program_of(drawn)
    expected = on_one_device(program)
    found = run(program, strategy_for(drawn.devices, drawn.stage))
    assert_same_tree(found, expected, program.__name__, 1e-6)


@pytest.mark.parametrize("number", range(24))
def test_it_is_one_device(number):
    assert_case(Drawn(number))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("losses", [("tokens",), ("tokens", "root")])
def test_two_steps_of_a_loss_with_a_value_for_each_token(losses, stage):
    """With an uneven last batch: ranks of one process waited for each other for ever."""
    drawn = Drawn(0)
    drawn.form, drawn.devices, drawn.stage, drawn.is_static = "uneven", 2, stage, False
    drawn.instructions = [("step", losses, "all", 0, "apply")] * 2
    assert_case(drawn)


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", range(100))
def test_many(block):
    """Two thousand."""
    for number in range(1000 + 20 * block, 1020 + 20 * block):
        assert_case(Drawn(number))
        on_one_device.cache_clear()
