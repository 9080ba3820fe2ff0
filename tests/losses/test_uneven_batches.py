"""Batches that the ranks do not share equally: losses, weights, slots and metrics are those of one device.

Batches of 16 of 33 examples leave a last batch of 1, so that all ranks but one get no example; of 37 a last batch of 5, of
which the first of 4 ranks gets 2; 3 ranks share 16 as 6, 5 and 5. All in float64: what differs is no rounding.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras.src.losses import loss as keras_loss
from training import CLASSES, FEATURES, assert_same, collect, one_device, small, strategy_for, vectors

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(180), pytest.mark.usefixtures("float64")]

BATCH = 16
WORDS, LENGTH = 11, 6


def crossentropy(reduction="sum_over_batch_size"):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def example_weights(size):
    """From 0 to 5, growing with the example, so that the ranks' sums differ much."""
    return np.linspace(0.0, 5.0, size).astype("float32")


def train(
    strategy,
    build,
    x,
    y,
    loss,
    optimizer=None,
    sample_weight=None,
    epochs=2,
    batch_size=BATCH,
    class_weight=None,
    evaluates=True,
    **compile_arguments,
):
    """Returns what `fit` leaves; its losses are all numbers that `fit` and, if it `evaluates`, `evaluate` report."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9) if optimizer is None else optimizer()
        model.compile(optimizer=optimizer, loss=loss(), **compile_arguments)
    arrays = {"batch_size": batch_size, "verbose": 0, "sample_weight": sample_weight}
    history = model.fit(x, y, epochs=epochs, shuffle=False, class_weight=class_weight, **arrays).history
    reported = [value for name in sorted(history) for value in history[name]]
    if evaluates:
        evaluated = model.evaluate(x, y, return_dict=True, **arrays)
        assert {name: len(values) for name, values in history.items()} == dict.fromkeys(evaluated, epochs)
        reported += [evaluated[name] for name in sorted(evaluated)]
    return collect(model, model.optimizer, reported, strategy)


@functools.cache
def fitted(devices, zero_stage, size, weighted=False):
    x, y = vectors(size)
    strategy = strategy_for(devices, zero_stage) if devices > 1 else one_device()
    weights = example_weights(size) if weighted else None
    metrics = {"metrics": ["accuracy"], "weighted_metrics": [keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]}
    return train(strategy, small, x, y, crossentropy, sample_weight=weights, **metrics)


@pytest.mark.parametrize(
    ("devices", "zero_stage", "size", "weighted"),
    [
        exhaustive(2, 0, 33, False),
        exhaustive(3, 2, 37, True),
        (4, 3, 33, False),
        exhaustive(3, 2, 33, False),
        exhaustive(3, 3, 37, True),
    ],
)
def test_last_partial_batch(devices, zero_stage, size, weighted):
    assert_same(fitted(devices, zero_stage, size, weighted), fitted(1, 0, size, weighted), rtol=1e-10)


def test_a_mean_of_means_would_fail_here(monkeypatch):
    for name in ("reduce_weighted_values", "scale_loss_for_distribution", "unscale_loss_for_distribution"):
        monkeypatch.setattr(keras_loss, name, getattr(keras_loss, name)._tfdist_original)
    x, y = vectors(33)
    theirs = train(strategy_for(4, 2), small, x, y, crossentropy, evaluates=False)
    mine = fitted(1, 0, 33)
    kernel = "2 sequential/head/kernel"
    assert np.abs(theirs.weights[kernel] - mine.weights[kernel]).max() > 1e-3


def test_the_batches_are_shared_as_this_file_says():
    shares = {}
    for size, devices in ((33, 2), (37, 3), (37, 4)):
        strategy = strategy_for(devices, 2)
        dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(size).batch(BATCH))
        shares[size, devices] = [[len(part) for part in strategy.experimental_local_results(batch)] for batch in dataset]
    assert shares == {
        (33, 2): [[8, 8], [8, 8], [1, 0]],
        (37, 3): [[6, 5, 5], [6, 5, 5], [2, 2, 1]],
        (37, 4): [[4, 4, 4, 4], [4, 4, 4, 4], [2, 1, 1, 1]],
    }


def compare(devices, zero_stage, *arguments, rtol=1e-10, **settings):
    expected = train(one_device(), *arguments, **settings)
    assert_same(train(strategy_for(devices, zero_stage), *arguments, **settings), expected, rtol=rtol)


def momentum():
    """For losses that are sums: steps small enough to stay where rounding is small."""
    return keras.optimizers.SGD(0.003, momentum=0.9)


@pytest.mark.parametrize("reduction", [exhaustive("sum"), exhaustive("mean"), "mean_with_sample_weight", None])
def test_reductions(reduction):
    """Without a reduction Keras logs the mean of the examples' losses and trains on their sum."""
    x, y = vectors(37)
    weights = example_weights(37)
    settings = {"optimizer": momentum, "sample_weight": weights, "metrics": ["accuracy"], "epochs": 3}
    compare(2, 2, small, x, y, functools.partial(crossentropy, reduction), evaluates=reduction is None, **settings)


def test_class_weight():
    x, y = vectors(33)
    class_weight = {label: 0.1 + label for label in range(CLASSES)}
    compare(2, 2, small, x, y, crossentropy, class_weight=class_weight, metrics=["accuracy"], epochs=3, evaluates=False)


def tagger(*between):
    """A label per word; words of index 0 are masked."""
    embedding, head = keras.layers.Embedding(WORDS, 5, mask_zero=True), keras.layers.Dense(CLASSES)
    return keras.Sequential([keras.Input((LENGTH,), dtype="int32"), embedding, *between, keras.layers.TimeDistributed(head)])


def recurrent_tagger():
    return tagger(keras.layers.SimpleRNN(6, return_sequences=True))


def sentences(size):
    """Sentences of 0 to 6 words, each batch sorted by length, so that the ranks' numbers of valid words differ much."""
    rng = np.random.default_rng(5)
    words = rng.integers(1, WORDS, size=(size, LENGTH))
    lengths = np.arange(size) % BATCH * (LENGTH + 1) // BATCH
    assert len(set(lengths)) == LENGTH + 1
    words[np.arange(LENGTH) >= lengths[:, None]] = 0
    return words.astype("int32"), rng.integers(0, CLASSES, size=(size, LENGTH))


def test_masks():
    """The first rank of four sees 2 valid words in a batch, the last 21; of the last batch of 33, no rank any."""
    words, labels = sentences(33)
    valid = (words[:BATCH] > 0).reshape(4, -1).sum(1)
    assert valid[0] * 10 < valid[-1]
    assert not words[-1].any()
    settings = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"], "optimizer": momentum}
    compare(3, 3, recurrent_tagger, words, labels, crossentropy, **settings)


def test_masks_and_weights():
    words, labels = sentences(37)
    weights = example_weights(37)[:, None] * np.linspace(0.5, 1.5, LENGTH, dtype="float32")
    settings = {"sample_weight": weights, "optimizer": momentum, "metrics": ["accuracy"], "epochs": 3, "evaluates": False}
    compare(2, 2, tagger, words, labels, crossentropy, **settings)


def two_heads():
    x = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(9, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.1))(x)
    return keras.Model(x, {"label": keras.layers.Dense(CLASSES)(hidden), "value": keras.layers.Dense(3)(hidden)})


def test_two_outputs_and_weight_regularisation_that_counts_once():
    x, y = vectors(33)
    targets = {"label": y, "value": x[:, :3] ** 2}

    def losses():
        return {"label": crossentropy(), "value": "mse"}

    settings = {"loss_weights": {"label": 0.7, "value": 1.9}, "metrics": {"label": "accuracy", "value": "mae"}}
    compare(3, 3, two_heads, x, targets, losses, **settings)


class Endpoint(keras.layers.Layer):
    """Adds three losses: a mean over rows, a Keras loss, and something computed of one."""

    def call(self, x):
        loss_of = keras.losses.MeanSquaredError()
        self.add_loss(0.3 * tf.reduce_mean(tf.reduce_sum(x**4, -1)))
        self.add_loss(loss_of(tf.zeros_like(x), x))
        self.add_loss(0.1 * loss_of(tf.ones_like(x), x))
        return x


def test_losses_that_layers_add():
    """Of parts of the batch that differ in rows, or have none; the activity regularizer is a mean over rows too."""

    def build():
        hidden = keras.layers.Dense(9, activation="tanh", activity_regularizer=keras.regularizers.L2(0.1))
        return keras.Sequential([keras.Input((FEATURES,)), hidden, Endpoint(), keras.layers.Dense(CLASSES)])

    x, y = vectors(33)
    compare(2, 2, build, x, y, crossentropy, metrics=["accuracy"], rtol=1e-7)  # 0.1 and the like are float32


def images():
    return keras.Sequential(
        [
            keras.Input((6, 5, 2)),
            keras.layers.Conv2D(3, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.LayerNormalization(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def test_images():
    x = np.random.default_rng(1).normal(size=(33, 6, 5, 2)).astype("float32")
    y = vectors(33)[1]
    settings = {"metrics": ["accuracy"], "epochs": 3, "evaluates": False}
    optimizer = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
    compare(2, 2, images, x, y, lambda: "sparse_categorical_crossentropy", optimizer=optimizer, **settings)


@pytest.mark.exhaustive  # also in tests/parity/test_steps_per_execution.py
def test_several_steps_per_execution():
    """The loop stands around `strategy.run`."""
    x, y = vectors(37)
    compare(2, 2, small, x, y, crossentropy, metrics=["accuracy"], steps_per_execution=2)


def test_scalar_losses_are_weighted_by_rows():
    """A function that takes the mean over its rows itself."""
    x, y = vectors(37)

    def loss():
        return lambda truth, predicted: tf.reduce_mean((predicted - truth) ** 2)

    compare(2, 0, small, x, np.eye(CLASSES)[y], loss, metrics=["mae"])


def test_sums_of_ranks_without_rows_are_numbers():
    """In a loop whose step is traced for the shapes of one batch: two of four ranks know that they have no rows."""
    strategy, loss = strategy_for(4, 2), crossentropy("sum")
    (batch,) = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(vectors(2)).batch(2))

    @tf.function
    def sums(x, y):
        return strategy.run(lambda x, y: loss(y, x[:, :CLASSES]), args=(x, y))

    found = [value.numpy() for value in strategy.experimental_local_results(sums(*batch))]
    x, y = vectors(2)
    assert [value.shape for value in found] == [()] * 4 and found[2:] == [0, 0]
    np.testing.assert_allclose(sum(found), loss(y, x[:, :CLASSES]))


class BatchLogs(keras.callbacks.Callback):
    def __init__(self):
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))

    on_test_batch_end = on_train_batch_end


def batch_logs(strategy):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    x, y = vectors(33)
    truth = np.eye(CLASSES)[y]
    metrics = keras.metrics
    with strategy.scope():
        model = small()
        chosen = ["accuracy", metrics.AUC(from_logits=True), metrics.F1Score(), metrics.R2Score(), metrics.Precision(top_k=2)]
        chosen += [metrics.OneHotMeanIoU(CLASSES), metrics.RootMeanSquaredError()]
        model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True), metrics=chosen)
    callback = BatchLogs()
    arguments = {"callbacks": [callback], "batch_size": BATCH, "verbose": 0}
    model.fit(x, truth, shuffle=False, **arguments)
    model.evaluate(x, truth, **arguments)
    return callback.logs


@pytest.mark.exhaustive  # with other metrics in tests/parity/test_metrics.py
def test_logs_of_batches():
    """Every callback sees the metrics of all rows so far; of the last batch two ranks have none."""
    found, expected = batch_logs(strategy_for(3, 2)), batch_logs(one_device())
    assert len(expected) == 6
    assert len(expected[0]) == 8
    for ours, theirs in zip(found, expected, strict=True):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-5, err_msg=name)
