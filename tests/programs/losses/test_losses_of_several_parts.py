"""Programs in the style of keras.io's tutorials whose losses are of several parts, of several outputs, or of the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers

import tfdist
from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import assert_as_on_one_device

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(180), pytest.mark.usefixtures("float64")]

ops = keras.ops
ROWS, BATCH = 22, 8  # the last batch has 6 rows
_rng = np.random.default_rng(8)
X = _rng.normal(size=(ROWS, 6))
IMAGES = _rng.random((ROWS, 8, 8, 1))
LABELS = _rng.integers(0, 3, ROWS)


def fit(model, *data, epochs=2, **settings):
    logs = BatchLogs()
    settings = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "callbacks": [logs], **settings}
    history = model.fit(*data, epochs=epochs, **settings).history
    return {"history": {name: flat(values) for name, values in history.items()}, "logs": logs.train, **state(model)}


def flat(values):
    return np.concatenate([np.ravel(np.asarray(value, "float64")) for value in values])


class Codebook(layers.Layer):
    """The quantizer of keras.io's VQ-VAE: the nearest code of each place, two losses that the layer adds, a straight-through."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(shape[-1], 5), initializer="random_uniform", name="codes")

    def call(self, x):
        rows = ops.reshape(x, (-1, x.shape[-1]))
        distances = ops.sum(rows**2, axis=1, keepdims=True) + ops.sum(self.codes**2, axis=0) - 2 * ops.matmul(rows, self.codes)
        chosen = ops.one_hot(ops.argmin(distances, axis=1), 5, dtype=x.dtype)
        quantized = ops.reshape(ops.matmul(chosen, ops.transpose(self.codes)), ops.shape(x))
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(quantized) - x) ** 2))
        self.add_loss(ops.mean((quantized - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(quantized - x)


def quantized_autoencoder(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(4, 3, 2, padding="same", activation="tanh", activity_regularizer="l2"),
                Codebook(),
                layers.Conv2DTranspose(1, 3, 2, padding="same"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return fit(model, IMAGES, IMAGES)


def soft_dice(y_true, y_pred):
    return 1 - 2 * ops.sum(y_true * y_pred) / (ops.sum(y_true) + ops.sum(y_pred) + 1)


def segmentation(strategy):
    """A U-Net's two losses on two outputs: crossentropy of every pixel, and Dice of the batch; one output has no loss."""
    with strategy.scope():
        inputs = keras.Input((8, 8, 1))
        hidden = layers.Conv2D(3, 3, padding="same", activation="relu")(inputs)
        masks = layers.Conv2D(1, 1, activation="sigmoid", name="masks")(hidden)
        outputs = {"masks": masks, "edges": layers.Conv2D(1, 3, padding="same", name="edges")(hidden), "hidden": hidden}
        model = keras.Model(inputs, outputs)
        losses = {"masks": tfdist.losses.OverGlobalBatch(soft_dice), "edges": "mse", "hidden": None}
        metrics = {"masks": [keras.metrics.BinaryIoU([1], name="iou")], "edges": ["mae"]}
        weights = {"masks": 2.0, "edges": 0.3, "hidden": 1.0}
        model.compile(keras.optimizers.Adam(0.01), losses, weights, metrics)
    found = fit(model, IMAGES, {"masks": np.round(IMAGES), "edges": IMAGES[::-1].copy(), "hidden": np.zeros((ROWS, 1))})
    targets = {"masks": np.round(IMAGES), "edges": IMAGES, "hidden": np.zeros((ROWS, 1))}
    return found, model.evaluate(IMAGES, targets, batch_size=5, verbose=0, return_dict=True)


def detection(strategy):
    """Boxes for a grid of anchors: a loss of boxes where there is an object, and one of classes that looks at the hard ones."""

    def of_boxes(y_true, y_pred):
        is_object = ops.cast(y_true[..., 4] > 0, y_pred.dtype)
        distance = ops.sum(ops.abs(y_true[..., :4] - y_pred), axis=-1)
        return ops.sum(is_object * distance, axis=-1) / ops.maximum(ops.sum(is_object, axis=-1), 1)

    with strategy.scope():
        inputs = keras.Input((6,))
        hidden = layers.Dense(12, activation="tanh")(inputs)
        boxes = layers.Reshape((5, 4), name="boxes")(layers.Dense(20)(hidden))
        kinds = layers.Reshape((5, 3), name="kinds")(layers.Dense(15)(hidden))
        model = keras.Model(inputs, {"boxes": boxes, "kinds": kinds})
        focal = keras.losses.CategoricalFocalCrossentropy(from_logits=True, reduction="sum")
        model.compile(
            keras.optimizers.AdamW(0.01, weight_decay=0.01, global_clipnorm=1.0),
            {"boxes": of_boxes, "kinds": focal},
            loss_weights={"boxes": 1.0, "kinds": 0.05},
            weighted_metrics={"kinds": ["categorical_accuracy"]},
        )
    rng = np.random.default_rng(2)
    boxes = np.concatenate([rng.random((ROWS, 5, 4)), rng.integers(0, 2, (ROWS, 5, 1))], axis=-1)
    targets = {"boxes": boxes, "kinds": np.eye(3)[rng.integers(0, 3, (ROWS, 5))]}
    weights = {"boxes": rng.random(ROWS), "kinds": rng.random((ROWS, 5))}
    return fit(model, X, targets, sample_weight=weights)


@tf.custom_gradient
def reversed_in_gradient(x):
    return tf.identity(x), lambda upstream: -0.5 * upstream


class Adapted(keras.Model):
    """Domain adaptation: a classifier of domains behind a reversed gradient, in `compute_loss`, with trackers of each part."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.domain = layers.Dense(5, "tanh"), layers.Dense(3), layers.Dense(1, kernel_regularizer="l2")
        self.parts = {name: keras.metrics.Mean(name=name) for name in ("label", "domain_loss")}

    def call(self, x):
        features = self.body(x)
        return self.head(features), self.domain(reversed_in_gradient(features))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        labels, domains = y
        logits, domain = y_pred
        of_labels = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits, sample_weight=domains[:, 0])
        of_domains = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(domains, domain))
        self.parts["label"].update_state(of_labels)
        self.parts["domain_loss"].update_state(of_domains)
        return of_labels + 0.3 * of_domains + sum(self.losses)

    def get_metrics_result(self):
        return {**super().get_metrics_result(), **{name: part.result() for name, part in self.parts.items()}}


def domain_adaptation(strategy):
    with strategy.scope():
        model = Adapted()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True))
    domains = (X[:, :1] > 0).astype("float64")
    found = fit(model, X, (LABELS, domains), validation_data=(X[:9], (LABELS[:9], domains[:9])))
    return found, {
        name: float(value) for name, value in model.evaluate(X, (LABELS, domains), verbose=0, return_dict=True).items()
    }


def barlow(one, other):
    """Barlow twins: the correlations of features over the batch are to be those of the identity."""
    one, other = ((x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 0.1) for x in (one, other))
    correlation = ops.matmul(ops.transpose(one), other) / ops.cast(ops.shape(one)[0], one.dtype)
    return ops.sum((correlation - ops.eye(4, dtype=one.dtype)) ** 2)


class Twins(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(7, "tanh"), layers.Dense(4)])
        self.loss_of = tfdist.losses.OverGlobalBatch(barlow)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(self.encoder(data), self.encoder(data * data))
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def twins(strategy):
    with strategy.scope():
        model = Twins()
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=16.0))
    return fit(model, X)


def language_model(strategy):
    """Next tokens, some of them padding, with perplexity as a metric of its own and as what a callback reads."""

    class Perplexity(keras.metrics.Metric):
        def __init__(self, name="perplexity"):
            super().__init__(name=name)
            self.total, self.count = (self.add_variable((), "zeros", name=name) for name in ("total", "count"))

        def update_state(self, y_true, y_pred, sample_weight=None):
            values = ops.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
            kept = ops.cast(y_true > 0, values.dtype)
            self.total.assign_add(ops.sum(values * kept))
            self.count.assign_add(ops.sum(kept))

        def result(self):
            return ops.exp(self.total / self.count)

    tokens = np.random.default_rng(1).integers(1, 9, (ROWS, 7))
    tokens[np.arange(7) >= np.random.default_rng(2).integers(3, 8, (ROWS, 1))] = 0
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Embedding(9, 5, mask_zero=True), layers.LSTM(6, return_sequences=True), layers.Dense(9)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
        model.compile(keras.optimizers.SGD(0.3, momentum=0.9), loss, metrics=[Perplexity()])
    plateau = keras.callbacks.ReduceLROnPlateau("perplexity", mode="min", patience=1, factor=0.5)
    stopping = keras.callbacks.EarlyStopping("val_perplexity", mode="min", patience=2, restore_best_weights=True)
    logs = BatchLogs()
    return fit(
        model,
        tokens[:, :-1],
        tokens[:, 1:],
        epochs=5,
        validation_data=(tokens[:9, :-1], tokens[:9, 1:]),
        callbacks=[plateau, stopping, logs],
    ) | {"logs": logs.train}


def loop_with_metrics(strategy):
    """A loop around `fit`'s functions, with metrics that are reset by hand, `evaluate(return_dict=True)` between."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(3)])
        kinds = keras.metrics
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        mean, hits = kinds.Mean(), kinds.SparseCategoricalAccuracy()
    found = []
    for _ in range(2):
        for start in range(0, ROWS, BATCH):
            rows = slice(start, start + BATCH)
            logs = model.train_on_batch(X[rows], LABELS[rows], return_dict=True)
            mean.update_state(logs["loss"], sample_weight=len(X[rows]))
            hits.update_state(LABELS[rows], model.predict_on_batch(X[rows]))
        found.append([float(mean.result()), float(hits.result())])
        found.append([float(value) for value in model.evaluate(X, LABELS, batch_size=5, verbose=0, return_dict=True).values()])
        mean.reset_state()
        hits.reset_state()
        model.reset_metrics()
    return found, state(model)


PROGRAMS = [quantized_autoencoder, segmentation, detection, domain_adaptation, twins, language_model, loop_with_metrics]
CHOSEN = set()  # none: a gradient that a model reverses is one of test_gradients_by_hand.py
CASES = [
    (program, stage) if (program, stage) in CHOSEN else exhaustive(program, stage)
    for program in PROGRAMS
    for stage in (0, 1, 2, 3)
]


@pytest.mark.parametrize(("program", "zero_stage"), CASES)
def test_it_is_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)
