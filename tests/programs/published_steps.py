"""Training steps as papers describe them, each the `train_step` of one model with two heads."""

import warnings

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import assert_as_on_one_device

ROWS, BATCH = 22, 8  # the last batch has 6 rows


class Trained(keras.Model):
    """A net with two heads and whatever else a step needs; `step(model, x, y)` is its `train_step`."""

    step = None

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(6, "tanh")])
        self.head = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        self.other = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        self.kept = [self.extra(variable.shape) for variable in self.trainable_variables]
        self.scales = self.add_weight(shape=(2,), initializer="ones", name="scales")
        self.number = self.extra((), "ones")

    def extra(self, shape, initializer="zeros"):
        return self.add_weight(shape=shape, initializer=initializer, trainable=False)

    def call(self, x):
        return self.head(self.body(x))

    @property
    def nets(self):
        return [v for net in (self.body, self.head, self.other) for v in net.trainable_variables]

    def losses_of(self, x, y):
        """The losses of two tasks."""
        hidden = self.body(x)
        first = keras.losses.sparse_categorical_crossentropy(y, self.head(hidden), from_logits=True)
        return tf.reduce_mean(first), tf.reduce_mean((self.other(hidden) - x[:, :3]) ** 2)

    def train_step(self, data):
        return type(self).step(self, *data)


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def program_of(step, optimizer):
    """A program that trains `Trained` with this step for two epochs: what each step logs, and the state."""

    def program(strategy):
        rng = np.random.default_rng(4)
        with strategy.scope():
            model = type("Trained", (Trained,), {"step": staticmethod(step)})()
            model.compile(optimizer())
        logs = BatchLogs()
        x, y = rng.normal(size=(ROWS, 5)).astype("float32"), rng.integers(0, 3, ROWS)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[logs]).history
        return {"history": history, "logs": logs.train, **state(model)}

    program.__name__ = step.__name__
    return program


def programs_of(steps):
    """The programs of steps and their optimizers, by their names."""
    return {step.__name__: program_of(step, optimizer) for step, optimizer in steps}


def assert_without_a_warning(program, zero_stage, devices):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert_as_on_one_device(program, zero_stage, devices)
    assert [str(one.message) for one in found if "device" in str(one.message)] == []
