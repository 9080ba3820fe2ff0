"""What a step computes of where the rows of a ragged or sparse batch begin: a rank has that of its own rows."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import strategy_for

from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import assert_as_on_one_device, run

pytestmark = pytest.mark.as_traced

ROWS, BATCH, WORDS = 13, 8, 7  # the last batch has 5 rows
RNG = np.random.default_rng(4)
LENGTHS = RNG.integers(1, 6, size=ROWS)
TEXT = tf.RaggedTensor.from_row_lengths(RNG.integers(0, WORDS, size=LENGTHS.sum()).astype("int32"), LENGTHS)
DENSE = np.where(RNG.random((ROWS, WORDS)) < 0.4, RNG.normal(size=(ROWS, WORDS)), 0.0).astype("float32")
TARGETS = RNG.normal(size=(ROWS, 3)).astype("float32")


def seeded():
    return keras.initializers.GlorotUniform(seed=2)


class Model(keras.Model):
    """The next word of each, and three numbers of each row; `of(model, x, y)` returns a loss and what is logged."""

    def __init__(self, of):
        super().__init__()
        self.of = of
        self.table = keras.layers.Embedding(WORDS, WORDS, embeddings_initializer=seeded())
        self.head = keras.layers.Dense(3, kernel_initializer=seeded())
        self.table.build((None,))
        self.head.build((None, WORDS))
        self.built = True

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss, logs = self.of(self, *data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, **logs}

    def words(self, text):
        values = text.flat_values
        return tf.nn.sparse_softmax_cross_entropy_with_logits(values, self.table(values))


def over_lengths(model, text, y):
    lengths = tf.cast(text.row_lengths(), tf.float32)
    logs = {"tokens": tf.reduce_sum(text.row_lengths()), "longest": tf.reduce_max(lengths), "spread": tf.math.reduce_std(lengths)}
    return tf.reduce_sum(model.words(text)) / tf.reduce_sum(lengths), logs


def weighted_rows(model, text, y):
    """By their lengths, and the mean of each row's words."""
    vectors = text.with_flat_values(model.table(text.flat_values))
    errors = tf.reduce_sum((model.head(tf.reduce_mean(vectors, 1)) - y) ** 2, -1)
    weights = tf.cast(text.row_lengths(), tf.float32)
    return tf.reduce_sum(weights * errors) / tf.reduce_sum(weights), {"rows": text.nrows()}


def root_of_row_sums(model, text, y):
    sums = tf.reduce_sum(text.with_flat_values(model.words(text)), 1)
    largest = tf.math.unsorted_segment_max(model.words(text), text.value_rowids(), text.nrows())
    return tf.sqrt(tf.reduce_mean(sums)) + tf.reduce_mean(largest) / tf.reduce_max(sums), {}


def padded_inputs_and_targets(model, text, y):
    dense = text.to_tensor()
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(dense, model.table(dense))
    return tf.reduce_mean(losses), {"length": tf.shape(dense)[1]}


def sparse_rows(model, x, y):
    errors = tf.reduce_sum((model.head(x) - y) ** 2, -1)
    rows = tf.cast(x.dense_shape[0], tf.float32)
    return tf.sqrt(tf.reduce_sum(errors) / rows) * tf.reduce_mean(tf.abs(x.values)), {"values": tf.size(x.values)}


def ctc_over_labels(strategy):
    """TensorFlow's loss of each row goes through loops; it is divided by the number of labels of the batch."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 4, size=ROWS)
    labels = np.where(np.arange(3) < lengths[:, None], rng.integers(1, 5, size=(ROWS, 3)), 0).astype("int32")

    class Aligned(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            counts = tf.reduce_sum(tf.cast(y > 0, tf.int32), -1)
            losses = keras.ops.ctc_loss(y, y_pred, counts, tf.fill(tf.shape(y)[:1], 6))
            return tf.reduce_sum(losses) / tf.cast(tf.reduce_sum(counts), tf.float32)

    with strategy.scope():
        inputs = keras.Input((6, 5))
        model = Aligned(inputs, keras.layers.Dense(5)(inputs))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    x = rng.normal(size=(ROWS, 6, 5)).astype("float32")
    history = model.fit(x, labels, batch_size=BATCH, shuffle=False, verbose=0).history
    return {"history": history, **state(model)}


@pytest.mark.parametrize("zero_stage", [0, exhaustive(3)])
def test_ctc(zero_stage):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The (loss|number).*contains")
        assert_as_on_one_device(ctc_over_labels, zero_stage)


def program(of):
    def fit(strategy):
        with strategy.scope():
            model = Model(of)
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        given = tf.sparse.from_dense(DENSE) if of in (sparse_rows, sums_of_sparse_rows) else TEXT
        record = BatchLogs()
        data = tf.data.Dataset.from_tensor_slices((given, TARGETS)).batch(BATCH)
        model.fit(data, verbose=0, shuffle=False, callbacks=[record])
        return {"logs": record.train, **state(model)}

    return fit


@pytest.mark.parametrize(
    ("of", "zero_stage", "devices"),
    [
        (over_lengths, 3, 2),
        (weighted_rows, 0, 2),
        (root_of_row_sums, 3, 2),
        (padded_inputs_and_targets, 0, 4),
        (sparse_rows, 3, 2),
        *(exhaustive(of, 3, 4) for of in (over_lengths, weighted_rows, root_of_row_sums, sparse_rows)),
    ],
)
def test_it_is_one_device(of, zero_stage, devices):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*contains")
        assert_as_on_one_device(program(of), zero_stage, devices)


def sums_of_sparse_rows(model, x, y):
    errors = tf.reduce_sum((model.head(x) - y) ** 2, -1)
    return tf.sqrt(tf.reduce_mean(errors * tf.sparse.reduce_sum(tf.abs(x), 1))), {}


def test_what_their_indices_do_not_tell():
    with pytest.warns(UserWarning, match="The loss of Model contains what the step is given beside rows"):
        run(program(sums_of_sparse_rows), strategy_for(2, 0))
