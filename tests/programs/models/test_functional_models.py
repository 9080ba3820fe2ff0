"""Functional models: skips, several inputs and outputs, states that another part begins with, strings, weights for each row."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops

from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device
from tests.programs.small_training import BATCH, ROWS, adam, fitted, integers, normal, sgd

pytestmark = pytest.mark.as_traced

FEATURES = 6


def segmentation(strategy):
    """A U-Net; a weight for each pixel, and an IoU that counts it."""
    with strategy.scope():
        image = keras.Input((12, 12, 1))
        down = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
        low = layers.SeparableConv2D(6, 3, padding="same", activation="relu")(layers.MaxPool2D()(down))
        up = layers.Conv2DTranspose(4, 3, padding="same")(layers.UpSampling2D()(low))
        classes = layers.Conv2D(3, 1, activation="softmax")(layers.Concatenate()([up, down]))
        model = keras.Model(image, classes)
        metrics = ["accuracy", keras.metrics.MeanIoU(3, sparse_y_pred=False)]
        model.compile(sgd(), "sparse_categorical_crossentropy", weighted_metrics=metrics)
    weights = np.abs(normal(12, 12, seed=3))
    return fitted(model, normal(12, 12, 1), integers(3, 12, 12), sample_weight=weights, epochs=1, validation_split=0.3)


def generated_text(strategy):
    """A small GPT with two outputs, of which one has no loss, and a callback that writes text."""
    written = []

    class Write(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            text = [1, 2, 3]
            while len(text) < FEATURES:
                logits, _ = self.model.predict(np.array([text + [0] * (FEATURES - len(text))]), verbose=0)
                text.append(int(logits[0, len(text) - 1].argmax()))
            written.append(text)

    with strategy.scope():
        ids = keras.Input((FEATURES,), dtype="int32")
        x = layers.Embedding(11, 8)(ids) + layers.Embedding(FEATURES, 8)(tf.range(FEATURES))
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True))
        model = keras.Model(ids, [layers.Dense(11)(x), x])
        model.compile(sgd(), loss=[keras.losses.SparseCategoricalCrossentropy(from_logits=True), None])
    tokens = integers(11, FEATURES, low=1)
    return {**fitted(model, tokens, np.roll(tokens, -1, 1), callbacks=[Write()]), "written": np.array(written)}


def translation(strategy):
    """Teacher forcing: an encoder's last states are a decoder's first; models for inference are cut out."""
    with strategy.scope():
        source, target = keras.Input((None,)), keras.Input((None,))
        *_, hidden, cell = layers.LSTM(6, return_state=True)(layers.Embedding(11, 5, mask_zero=True)(source))
        embedded = layers.Embedding(11, 5, mask_zero=True)(target)
        outputs, *_ = layers.LSTM(6, return_sequences=True, return_state=True)(embedded, initial_state=[hidden, cell])
        model = keras.Model([source, target], layers.Dense(11, activation="softmax")(outputs))
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = integers(11, FEATURES), integers(11, FEATURES, seed=8)
    found = fitted(model, [x, y], np.roll(y, -1, 1), epochs=1, validation_data=([x[:5], y[:5]], y[:5]))
    return {**found, "states": keras.Model(source, [hidden, cell]).predict(x[:3], verbose=0)}


def speech(strategy):
    with strategy.scope():
        recurrent = layers.Bidirectional(layers.GRU(4, return_sequences=True))
        model = keras.Sequential([keras.Input((10, 4)), recurrent, layers.Dense(6)])
        model.compile(adam(), keras.losses.CTC())
    found = fitted(model, normal(10, 4), integers(5, 3, low=1), epochs=1)
    logits = model.predict(normal(10, 4), verbose=0)
    decoded = ops.ctc_decode(logits, np.full(ROWS, 10), strategy="greedy")
    return {**found, "scores": decoded[1].numpy()}


def mixed_table(strategy):
    """Wide and deep with crosses: numbers and strings in a dictionary, a vocabulary in the model."""
    with strategy.scope():
        number, word = keras.Input((1,), name="number"), keras.Input((1,), name="word", dtype="string")
        index = layers.StringLookup(vocabulary=["x", "y", "z"])(word)
        first = layers.concatenate([number, layers.Flatten()(layers.Embedding(4, 3)(index))])
        crossed = first
        for _ in range(2):
            crossed = first * layers.Dense(4)(crossed) + crossed
        deep = layers.BatchNormalization(synchronized=True)(layers.Dense(4, "relu")(first))
        wide = layers.CategoryEncoding(4, output_mode="one_hot")(index)
        classes = layers.Dense(2, activation="softmax")(layers.concatenate([crossed, deep, wide]))
        model = keras.Model({"number": number, "word": word}, classes)
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    words = np.array(["x", "y", "z"])[integers(3, 1)]
    data = tf.data.Dataset.from_tensor_slices(({"number": normal(1), "word": words}, integers(2, seed=9))).batch(BATCH)
    history = model.fit(data, epochs=2, verbose=0).history
    return {"history": history, "predicted": model.predict(data, verbose=0), **state(model)}


class Hypernetwork(layers.Layer):
    """Makes each row's own weights."""

    def __init__(self):
        super().__init__()
        self.kernels, self.biases = layers.Dense(FEATURES * 3), layers.Dense(3)

    def call(self, x, task):
        kernels = ops.reshape(self.kernels(task), (-1, FEATURES, 3))
        return ops.squeeze(ops.matmul(x[:, None], kernels), 1) + self.biases(task)


def hypernetwork(strategy):
    with strategy.scope():
        x, task = keras.Input((FEATURES,)), keras.Input((FEATURES,))
        model = keras.Model([x, task], Hypernetwork()(x, task))
        model.compile(sgd(), "mse")
    return fitted(model, [normal(FEATURES), normal(FEATURES, seed=4)], normal(3, seed=2))


PROGRAMS = (
    segmentation,
    generated_text,
    translation,
    speech,
    mixed_table,
    hypernetwork,
)


@pytest.mark.parametrize(("program", "zero_stage"), [exhaustive(program, stage) for program in PROGRAMS for stage in (0, 3)])
def test_it_is_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)
