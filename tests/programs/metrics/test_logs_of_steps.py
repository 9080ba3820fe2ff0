"""Integers and truths that a custom step returns: of the batch, as its floating numbers are."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import assert_as_on_one_device, stages_in_turns

pytestmark = pytest.mark.as_traced

RNG = np.random.default_rng(6)
X, Y = RNG.normal(size=(13, 5)).astype("float32"), RNG.normal(size=(13, 3)).astype("float32")


class Counting(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x)
            loss = tf.reduce_mean((found - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        finite = tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(g)) for g in gradients]))
        return {"loss": loss, "finite": finite, "far": tf.reduce_any(x > 1.5), "is_large": loss > 1.0, **self.counted(found, y)}

    def test_step(self, data):
        x, y = data
        return self.counted(self(x), y)

    def counted(self, found, y):
        hits = tf.argmax(found, -1) == tf.argmax(y, -1)
        return {
            "correct": tf.reduce_sum(tf.cast(hits, tf.int32)),
            "positive": tf.math.count_nonzero(y > 0),
            "rows": tf.shape(y)[0],
            "largest": tf.reduce_max(tf.argmax(y, -1)),
            "seven": tf.constant(7),
        }


def counted(strategy, run_eagerly=False):
    with strategy.scope():
        model = Counting()
        model.compile(keras.optimizers.SGD(0.05), run_eagerly=run_eagerly)
    record = BatchLogs()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    model.fit(data, verbose=0, shuffle=False, callbacks=[record])
    evaluated = model.evaluate(data, verbose=0, return_dict=True)
    return {"logs": record.train, "evaluated": evaluated, **state(model)}


def counted_eagerly(strategy):
    return counted(strategy, run_eagerly=True)


@pytest.mark.parametrize(("program", "zero_stage"), list(stages_in_turns([counted, counted_eagerly])))
def test_it_is_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)


def test_four_devices():
    assert_as_on_one_device(counted, 3, devices=4)
