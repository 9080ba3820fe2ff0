"""Scopes of names that TensorFlow gives to what its tapes and loops make: a user's own are no such."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.programs.comparing import assert_as_on_one_device, fitted, stages_in_turns

pytestmark = pytest.mark.as_traced

RNG = np.random.default_rng(0)
X = RNG.normal(size=(13, 3)).astype("float32")  # batches of 5, 5 and 3 rows
Y = RNG.normal(size=(13, 2)).astype("float32")
DATA = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)


class Model(keras.Model):
    """A loss in a scope of that name, and gradients that meet a number of the batch in another one."""

    def __init__(self, name):
        super().__init__()
        self.scope = name
        self.hidden = keras.layers.Dense(4, "tanh", kernel_initializer=keras.initializers.GlorotUniform(seed=1), name=name)
        self.out = keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(seed=2))
        self.hidden.build((None, 3))
        self.out.build((None, 4))
        self.built = True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape, tf.name_scope(self.scope):
            hidden = self.hidden(x)
            loss = tf.sqrt(tf.reduce_mean((self.out(hidden - tf.reduce_mean(hidden, 0)) - y) ** 2))
        with tf.name_scope(f"inner/{self.scope}"):
            gradients = tape.gradient(loss, self.trainable_variables)
            gradients = [gradient * tf.reduce_mean(tf.abs(x)) for gradient in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize(("name", "zero_stage"), stages_in_turns(("gradients", "gradient_tape", "loop_body")))
def test_it_is_one_device(name, zero_stage):
    assert_as_on_one_device(fitted(Model, name, data=DATA), zero_stage)
