"""Losses in `fit` that a device cannot compute of its own rows: all are one device's; what cannot be gathered is warned of."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import CLASSES, vectors

import tfdist
from tests import op_creation
from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import SHARDED, assert_as_on_one_device
from tests.programs.loops.test_custom_steps import BATCH, Model, fit
from tfdist.placements import telling

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(180), pytest.mark.usefixtures("float64")]


@pytest.fixture(autouse=True)
def nothing_told():
    telling._told.clear()


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
# Sums, and functions of all rows: devices agree on the numbers, or gather the rows.
NO_MEANS = {
    "sum": lambda m, x, y, p: tf.reduce_sum(errors_of(y, p)) / BATCH,
    "half a sum": lambda m, x, y, p: 0.01 * tf.nn.l2_loss(y - p) + tf.reduce_mean(p * p),
    "masked mean": lambda m, x, y, p: tf.reduce_sum(errors_of(y, p) * y[:, 0]) / (tf.reduce_sum(y[:, 0]) + 1),
    "mean of some rows": lambda m, x, y, p: tf.reduce_mean(tf.boolean_mask(errors_of(y, p), x[:, 0] > 0)),
    "mean of rows that a condition finds": lambda m, x, y, p: tf.reduce_mean(
        errors_of(*(tf.gather_nd(z, tf.where(x[:, 0] > 0)) for z in (y, p)))
    ),
    "sum of some rows over their number": lambda m, x, y, p: (lambda e: tf.reduce_sum(e) / tf.cast(tf.size(e), e.dtype))(
        tf.boolean_mask(errors_of(y, p), x[:, 0] > 0)
    ),
    "root": lambda m, x, y, p: tf.sqrt(tf.reduce_mean(errors_of(y, p)) + 1),
    "pairs": lambda m, x, y, p: tf.reduce_mean(tf.square(tf.einsum("ik,jk->ij", p, y))),
    "Keras's sum over the rows": lambda m, x, y, p: keras.losses.MeanSquaredError(reduction="sum")(y, p) / rows_of(x),
}


def silently(program):
    """Runs `program`, which is to warn of nothing that has to do with rows."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        left = program()
    assert not [str(one.message) for one in told if "rows" in str(one.message)]
    return left


@pytest.mark.parametrize("zero_stage", SHARDED)
@pytest.mark.parametrize(
    "name", [name if name in ("average of the rows", "sampled classes") else exhaustive(name) for name in EXACT]
)
def test_sums_that_are_exact(name, zero_stage):
    def program(strategy):
        left = silently(lambda: fit(strategy, stepping(EXACT[name]), optimizer=small_steps, loss=None))
        if name == "a loss of every row":  # its log is an array, of which there is no mean here
            del left["history"], left["evaluated"]
        return left

    assert_as_on_one_device(program, zero_stage)


@pytest.mark.parametrize("zero_stage", SHARDED)
@pytest.mark.parametrize("name", [name if name in ("sum", "masked mean") else exhaustive(name) for name in NO_MEANS])
def test_what_is_no_mean_is_exact(name, zero_stage):
    def program(strategy):
        return silently(lambda: fit(strategy, stepping(NO_MEANS[name]), optimizer=small_steps, loss=None))

    assert_as_on_one_device(program, zero_stage)


def test_sums_with_the_setting_that_says_so():
    """With `step_losses="sum"` the loss is TensorFlow's part of a sum, and nothing is told."""

    def program(strategy):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            left = fit(strategy, stepping(NO_MEANS["sum"]), optimizer=small_steps, loss=None, evaluates=False)
        return {name: left[name] for name in ("weights", "slots")}

    assert_as_on_one_device(program, 2, step_losses="sum")


def root_of_the_mean(y_true, y_pred):
    return tf.sqrt(tf.reduce_mean(tf.square(y_true - y_pred)))


def compiled(strategy, loss, targets, batch_size=BATCH, rate=0.01):
    """Fits on 37 rows, with a smaller last batch, or on 32 in equal ones, of which the trace knows the number of rows."""
    x, y = vectors(37 if batch_size == BATCH else 32)
    logs = BatchLogs()
    with strategy.scope():
        model = Model()
        model.compile(keras.optimizers.SGD(rate), loss)
    arrays = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": [logs]}
    history = model.fit(x, targets(y), **arrays).history
    return {"history": history, "logs": logs.train, **state(model)}


def one_hot(y):
    return np.eye(CLASSES)[y]


@pytest.mark.parametrize("zero_stage", SHARDED)
@pytest.mark.parametrize(
    "loss",
    [
        root_of_the_mean,
        keras.losses.Dice(),
        exhaustive(keras.losses.Tversky()),
        exhaustive(tfdist.losses.OverGlobalBatch(root_of_the_mean)),
        lambda y_true, y_pred: tf.reduce_mean(tf.square(y_true - y_pred)),
        exhaustive(lambda y_true, y_pred: tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)),
        exhaustive(keras.losses.Dice(axis=-1)),
        exhaustive(keras.losses.MeanSquaredError(reduction="sum")),
        exhaustive("huber"),
    ],
)
@pytest.mark.parametrize("batch_size", [BATCH, exhaustive(8)])
def test_compiled_functions_of_a_batch_are_exact(loss, batch_size, zero_stage):
    def program(strategy):
        return silently(lambda: compiled(strategy, loss, one_hot, batch_size))

    assert_as_on_one_device(program, zero_stage)


DIVIDED = {
    "a number of Python": lambda e: tf.reduce_sum(e) / e.shape[0],
    "the number of the trace": lambda e: tf.reduce_sum(e) / tf.cast(tf.shape(e)[0], e.dtype),
    "a constant as a factor": lambda e: tf.reduce_sum(e) * (1 / 4),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_sum_over_a_number_like_that_of_the_devices_rows(name):
    """A device has 4 rows: a division by 4 is told, and counts as a mean; what the warning names is one device's, silently."""

    def loss(y_true, y_pred):
        return DIVIDED[name](errors_of(y_true, y_pred))

    def program(strategy):
        if name != "a number of Python" or strategy.num_replicas_in_sync == 1:
            return silently(lambda: compiled(strategy, loss, one_hot, 8))
        with op_creation.with_stacks(), pytest.warns(UserWarning, match=r"divided by a number .* \(.*test_losses_that.*, line "):
            return compiled(strategy, loss, one_hot, 8)

    assert_as_on_one_device(program, 3)


def pairs(embeddings, others):
    """Negatives are the other rows of the batch."""
    logits = keras.ops.matmul(embeddings, keras.ops.transpose(others))
    return keras.ops.sparse_categorical_crossentropy(tf.range(tf.shape(logits)[0]), logits, from_logits=True)


def of_references(y, p):
    return keras.losses.circle(y[:, 0], p, np.arange(3), np.eye(3, CLASSES))


@pytest.mark.parametrize(
    ("loss", "compares"),
    [
        (keras.losses.Circle(), True),
        exhaustive(pairs, True),
        exhaustive(tfdist.losses.OverGlobalBatch(keras.losses.Circle()), False),
        (tfdist.losses.OverGlobalBatch(pairs), False),
        exhaustive(of_references, False),
    ],
)
@pytest.mark.parametrize("batch_size", [BATCH, 8])
def test_rows_that_are_compared_are_gathered_or_told(loss, compares, batch_size):
    """Also where the number of rows is known when the step is traced."""
    targets = np.asarray if isinstance(getattr(loss, "loss", loss), keras.losses.Circle) else one_hot

    def program(strategy):
        return compiled(strategy, loss, targets, batch_size, 1e-4)

    silent = functools.wraps(program)(lambda strategy: silently(lambda: program(strategy)))
    assert_as_on_one_device(silent, 3)


def largest_error(y_true, y_pred):
    return tf.reduce_max(tf.square(y_true - y_pred))


@pytest.mark.parametrize(("zero_stage", "run_eagerly"), [(0, True), (3, False)])
def test_a_compiled_loss_that_is_an_extreme(zero_stage, run_eagerly):
    def program(strategy):
        x, y = vectors(13)
        with strategy.scope():
            model = Model()
            model.compile(keras.optimizers.SGD(0.01), largest_error, run_eagerly=run_eagerly)
        history = model.fit(x, one_hot(y), batch_size=8, epochs=2, shuffle=False, verbose=0).history
        return {"history": history, **state(model)}

    assert_as_on_one_device(program, zero_stage)
