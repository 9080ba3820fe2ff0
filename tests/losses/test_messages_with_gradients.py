"""Messages through which a tape goes back, in a `train_step` or `compute_loss` of one's own: whatever they are called and for."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive

import tfdist
from tests.programs.comparing import assert_as_on_one_device, fitted

pytestmark = pytest.mark.as_traced

RNG = np.random.default_rng(0)
X = RNG.normal(size=(13, 3)).astype("float32")  # batches of 5, 5 and 3 rows
Y = RNG.normal(size=(13, 2)).astype("float32")
DATA = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)


def seeded():
    return keras.initializers.GlorotUniform(seed=1)


class Model(keras.Model):
    """`of(model, x, y)` returns the loss of a `train_step`."""

    def __init__(self, of):
        super().__init__()
        self.out = keras.layers.Dense(2, kernel_initializer=seeded())
        self.weights_of = keras.layers.Dense(1, "sigmoid", kernel_initializer=seeded())
        self.out.build((None, 3))
        self.weights_of.build((None, 3))
        self.of = of
        self.built = True

    def call(self, x):
        return self.out(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.of(self, *data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class OfKerasStep(Model):
    """The same as what Keras's `train_step` calls."""

    train_step = keras.Model.train_step

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.of(self, x, y)


def ratio(y, p):
    return tf.reduce_sum((p - y) ** 2) / tf.reduce_sum(tf.abs(y))


OF_ALL_ROWS = tfdist.losses.OverGlobalBatch(ratio)
BY_WEIGHT = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


def over_the_batch(model, x, y):
    return OF_ALL_ROWS(y, model.out(x)) + tf.reduce_mean(model.weights_of(x))


def by_weights_of_the_model(model, x, y):
    return BY_WEIGHT(y, model.out(x), sample_weight=model.weights_of(x)[:, 0])


def named_like_a_count(model, x, y):
    """A message of the user's."""
    total = tf.reduce_sum((model.out(x) - y) ** 2) + tf.reduce_sum(model.weights_of(x))
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        total = tfdist.collectives.all_reduce(total, "data", label="loss/total")
    return tf.sqrt(total)


def from_rank_to_rank(model, x, y):
    """The second part of the rows is centred by the mean of the first."""
    p = model.out(x)
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        rows = tf.shape(p)[0]
        first, second = p[: (rows + 1) // 2], p[(rows + 1) // 2 :]
        summed = tf.reduce_sum(first**2) + tf.reduce_sum((second - tf.reduce_mean(first, 0)) ** 2)
        return summed / tf.cast(2 * rows, p.dtype) + tf.reduce_mean(model.weights_of(x))
    if tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group) == 0:
        own = tf.reduce_mean(p**2) + tfdist.collectives.send(tf.reduce_mean(p, 0), 1)
    else:
        anchor = tf.reduce_sum(model.out.kernel)  # which the tape watches
        own = tf.reduce_mean((p - tfdist.collectives.receive([2], p.dtype, 0, anchor=anchor)) ** 2)
    return own + tf.reduce_mean(model.weights_of(x))


@pytest.mark.parametrize("of", (over_the_batch, by_weights_of_the_model, named_like_a_count, from_rank_to_rank))
@pytest.mark.parametrize("kind", (Model, OfKerasStep))
@pytest.mark.parametrize("zero_stage", (0, exhaustive(1), exhaustive(2), 3))
def test_it_is_one_device(zero_stage, kind, of):
    assert_as_on_one_device(fitted(kind, of, data=DATA), zero_stage)
