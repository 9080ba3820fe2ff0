"""Losses in `fit` that a device cannot compute of its own rows: what is exact all the same, and what is told once."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import CLASSES, strategy_for, vectors

import tfdist
from tests.programs.comparing import SHARDED, assert_as_on_one_device, run
from tests.programs.test_custom_steps import BATCH, Model, fit
from tfdist.losses import warning

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(180), pytest.mark.usefixtures("float64")]


@pytest.fixture(autouse=True)
def nothing_told():
    warning._told.clear()


def stepping(loss_of):
    """Returns a model whose steps take `loss_of(model, x, y, y_pred)`, y one-hot."""

    class Stepping(Model):
        def loss_of(self, data):
            x, y = data[:2]
            return loss_of(self, x, keras.ops.one_hot(y, CLASSES, dtype="float64"), self(x))

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = self.loss_of(data)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"total": tf.reduce_mean(loss)}

        def test_step(self, data):
            return {"total": tf.reduce_mean(self.loss_of(data))}

    return Stepping


def errors_of(y, y_pred):
    return tf.reduce_sum(tf.square(y_pred - y), axis=-1)


def small_steps():
    return keras.optimizers.SGD(0.01)


def rows_of(x):
    return tf.cast(tf.shape(x)[0], tf.float64)


def of_sampled_classes(y, p):
    counts = tf.fill([tf.shape(y)[0], 1], tf.constant(0.3, tf.float64)), tf.fill([3], tf.constant(0.3, tf.float64))
    labels, table = tf.argmax(y, -1)[:, None], tf.eye(CLASSES, dtype="float64")
    sampled = (tf.constant([1, 3, 5], tf.int64), *counts)
    return tf.nn.nce_loss(table, tf.zeros(CLASSES, "float64"), labels, p, 3, CLASSES, sampled_values=sampled)


# Sums that are seen to be one device's: nothing is told.
EXACT = {
    "average of a batch size": lambda m, x, y, p: tf.nn.compute_average_loss(errors_of(y, p), global_batch_size=BATCH),
    "average of the rows": lambda m, x, y, p: (
        tf.nn.compute_average_loss(errors_of(y, p), sample_weight=tf.abs(y[:, 0]) + 0.5)
        + tf.nn.scale_regularization_loss([tf.nn.l2_loss(weight) for weight in m.trainable_weights])
    ),
    "Keras's sum": lambda m, x, y, p: keras.losses.MeanSquaredError(reduction="sum")(y, p) / BATCH,
    "sum over the rows": lambda m, x, y, p: tf.reduce_sum(errors_of(y, p)) / rows_of(x) + keras.ops.mean(p * p),
    "sums over the rows": lambda m, x, y, p: (
        (0.0 + 0.5 * tf.reduce_sum(tf.abs(p)) + 0.5 * tf.reduce_sum(p * p)) / rows_of(x)
        + tf.reduce_sum(tf.boolean_mask(errors_of(y, p), x[:, 0] > 0)) / rows_of(x)
    ),
    "sampled classes": lambda m, x, y, p: tf.reduce_mean(of_sampled_classes(y, p)),
    "reciprocal": lambda m, x, y, p: keras.ops.sum(errors_of(y, p)) * (1.0 / rows_of(x)),
    "a loss of every row": lambda m, x, y, p: 0.05 * errors_of(y, p),
    "several means": lambda m, x, y, p: tf.reduce_sum(
        tf.stack([tf.reduce_mean(errors_of(y, p)), tf.exp(m.head.bias[0]) * tf.reduce_mean(tf.abs(p)), m.head.bias[1] ** 2])
    ),
}
NO_MEANS = {
    "sum": (lambda m, x, y, p: tf.reduce_sum(errors_of(y, p)) / BATCH, "a sum over the rows"),
    "half a sum": (lambda m, x, y, p: 0.01 * tf.nn.l2_loss(y - p) + tf.reduce_mean(p * p), "a sum over the rows"),
    "masked mean": (
        lambda m, x, y, p: tf.reduce_sum(errors_of(y, p) * y[:, 0]) / (tf.reduce_sum(y[:, 0]) + 1),
        "a function of the whole batch",
    ),
    "mean of some rows": (
        lambda m, x, y, p: tf.reduce_mean(tf.boolean_mask(errors_of(y, p), x[:, 0] > 0)),
        "a function of the whole batch",
    ),
    "mean of rows that a condition finds": (
        lambda m, x, y, p: tf.reduce_mean(errors_of(*(tf.gather_nd(z, tf.where(x[:, 0] > 0)) for z in (y, p)))),
        "a function of the whole batch",
    ),
    "sum of some rows over their number": (
        lambda m, x, y, p: (lambda e: tf.reduce_sum(e) / tf.cast(tf.size(e), e.dtype))(
            tf.boolean_mask(errors_of(y, p), x[:, 0] > 0)
        ),
        "a function of the whole batch",
    ),
    "root": (lambda m, x, y, p: tf.sqrt(tf.reduce_mean(errors_of(y, p)) + 1), "a function of the whole batch"),
    "pairs": (
        lambda m, x, y, p: tf.reduce_mean(tf.square(tf.einsum("ik,jk->ij", p, y))),
        "a product of rows with each other",
    ),
    "Keras's sum over the rows": (
        lambda m, x, y, p: keras.losses.MeanSquaredError(reduction="sum")(y, p) / rows_of(x),
        "a Keras loss whose reduction is a sum",
    ),
}


@pytest.mark.parametrize("zero_stage", SHARDED)
@pytest.mark.parametrize("name", [name if name.startswith("average of the") else exhaustive(name) for name in EXACT])
def test_sums_that_are_exact(name, zero_stage):
    def program(strategy):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            left = fit(strategy, stepping(EXACT[name]), optimizer=small_steps, loss=None)
        assert not [str(one.message) for one in told if "rows" in str(one.message)]
        if name == "a loss of every row":  # its log is an array, of which there is no mean here
            del left["history"], left["evaluated"]
        return left

    assert_as_on_one_device(program, zero_stage)


def told(strategy, build, **arguments):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(lambda strategy: fit(strategy, build, **arguments), strategy)
    return [str(one.message) for one in found if "rows" in str(one.message)]


@pytest.mark.parametrize("name", [name if name in ("sum", "masked mean") else exhaustive(name) for name in NO_MEANS])
def test_what_is_no_mean_is_told_once(name):
    loss_of, words = NO_MEANS[name]
    build = stepping(loss_of)
    (message,) = told(strategy_for(2, 0), build, loss=None, optimizer=small_steps)
    assert message.startswith(f"The loss of Stepping contains {words}")


def test_sums_with_the_setting_that_says_so():
    """With `step_losses="sum"` the loss is TensorFlow's part of a sum, and nothing is told."""

    def program(strategy):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            left = fit(strategy, stepping(NO_MEANS["sum"][0]), optimizer=small_steps, loss=None, evaluates=False)
        return {name: left[name] for name in ("weights", "slots")}

    assert_as_on_one_device(program, 2, step_losses="sum")


def root_of_the_mean(y_true, y_pred):
    return tf.sqrt(tf.reduce_mean(tf.square(y_true - y_pred)))


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (root_of_the_mean, "root_of_the_mean"),
        (keras.losses.Dice(), "dice"),
        exhaustive(keras.losses.Tversky(), "tversky"),
        exhaustive(tfdist.losses.OverGlobalBatch(root_of_the_mean), None),
        (lambda y_true, y_pred: tf.reduce_mean(tf.square(y_true - y_pred)), None),
        exhaustive(lambda y_true, y_pred: tf.reduce_mean(tf.square(y_true - y_pred), axis=-1), None),
        exhaustive(keras.losses.Dice(axis=-1), None),
        exhaustive(keras.losses.MeanSquaredError(reduction="sum"), None),
        exhaustive("huber", None),
    ],
)
def test_functions_of_a_batch_are_told(loss, name):
    x, y = vectors(32)

    def train():
        with strategy_for(2, 0).scope():
            model = Model()
            model.compile("sgd", loss)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model.fit(x, np.eye(CLASSES)[y], batch_size=BATCH, verbose=0)
        return [str(one.message) for one in found if "returns one number" in str(one.message)]

    messages = train()
    assert all("tfdist.losses.OverGlobalBatch" in message for message in messages)
    assert [message.split("`")[1] for message in messages] == ([] if name is None else [name])
    assert train() == []


def pairs(embeddings, others):
    """Negatives are the other rows of the batch."""
    logits = keras.ops.matmul(embeddings, keras.ops.transpose(others))
    return keras.ops.sparse_categorical_crossentropy(tf.range(tf.shape(logits)[0]), logits, from_logits=True)


@pytest.mark.parametrize(
    ("loss", "is_told"),
    [
        (keras.losses.Circle(), True),
        exhaustive(pairs, True),
        exhaustive(tfdist.losses.OverGlobalBatch(keras.losses.Circle()), False),
        (tfdist.losses.OverGlobalBatch(pairs), False),
        exhaustive(lambda y, p: keras.losses.circle(y[:, 0], p, np.arange(3), np.eye(3, CLASSES)), False),
    ],
)
def test_rows_that_are_compared_are_told(loss, is_told):
    x, y = vectors(32)
    targets = y if isinstance(getattr(loss, "loss", loss), keras.losses.Circle) else np.eye(CLASSES)[y]
    with strategy_for(2, 3).scope():
        model = Model()
        model.compile("sgd", loss)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(x, targets, batch_size=BATCH, verbose=0)
        model.fit(x, targets, batch_size=9, verbose=0)
    messages = [str(one.message) for one in found if "rows" in str(one.message)]
    assert len(messages) == is_told
    assert not is_told or messages[0].startswith("The loss of Model contains a product of rows with each other.")
