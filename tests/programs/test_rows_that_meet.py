"""Models and losses in which rows of a batch meet: a device has a part of them alone, which is told. Nothing else is."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops
from training import strategy_for

from tfdist.losses import warning


def of(function):
    return lambda: keras.Sequential([layers.Dense(4), layers.Lambda(function), layers.Dense(3)])


def all_pairs(y, found):
    distances = ops.sum(ops.square(found[:, None] - found[None]), -1)
    return ops.maximum(1 + ops.mean(distances, 1) - ops.max(distances, 1), 0.0)


def next_row(y, found):
    return ops.sum(ops.abs(found - y), -1) / (1 + ops.sum(ops.abs(tf.roll(found, 1, 0) - y), -1))


def advantages(y, found):
    return (y[:, 0] - ops.mean(y[:, 0])) / (ops.std(y[:, 0]) + 1e-6) * ops.logsumexp(found, -1)


def deviation(x):
    return ops.concatenate([x, ops.ones_like(x[:, :1]) * ops.mean(ops.std(x, 0))], -1)


def plain():
    return keras.Sequential([layers.Dense(3)])


def normalized():
    return keras.Sequential([layers.Dense(4), layers.BatchNormalization(), layers.LayerNormalization(), layers.Dense(3)])


def of_sequences():
    sequence = [layers.Reshape((4, 4)), layers.Bidirectional(layers.GRU(4, return_sequences=True))]
    block = [layers.Conv1D(4, 2), layers.GroupNormalization(2), layers.UnitNormalization(), layers.GlobalAveragePooling1D()]
    return keras.Sequential([layers.Dense(16), *sequence, *block, layers.Dense(3)])


def attended():
    x = keras.Input((8,))
    rows = layers.Reshape((2, 4))(x)
    rows = layers.MultiHeadAttention(2, 2)(rows, rows, use_causal_mask=True)
    return keras.Model(x, layers.Dense(3, activity_regularizer="l2")(layers.Flatten()(rows)))


@pytest.mark.as_traced
@pytest.mark.parametrize(
    ("build", "loss", "is_told"),
    [
        (plain, all_pairs, True),
        exhaustive(plain, next_row, True),
        exhaustive(plain, advantages, True),
        exhaustive(of(lambda x: x[::-1]), "mse", True),
        exhaustive(of(lambda x: x - ops.mean(x, 0)), "mse", True),
        (of(deviation), "mse", True),
        (normalized, "mse", False),
        exhaustive(of_sequences, "cosine_similarity", False),
        exhaustive(attended, keras.losses.CategoricalCrossentropy(from_logits=True), False),
        exhaustive(of(lambda x: x - ops.mean(x, -1, keepdims=True)), "huber", False),
    ],
)
def test_they_are_told(build, loss, is_told):
    warning._told.clear()
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(11, 8)).astype("float32"), rng.uniform(size=(11, 3)).astype("float32")
    with strategy_for(2, 0).scope():
        model = build()
        model.compile("sgd", loss)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=4, verbose=0)
    messages = [str(one.message) for one in found if "rows" in str(one.message)]
    assert [message for message in messages if "rows that meet other rows" not in message] == []
    assert len(messages) == is_told
    assert not is_told or ("OverGlobalBatch" in messages[0] and "all_gather" in messages[0])
