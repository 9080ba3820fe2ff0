"""Models and losses in which rows of a batch meet: those of all devices do. Only what cannot be gathered is warned of."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops
from training import one_device, strategy_for

from tests.parity.comparison import assert_same_tree, state
from tests.programs.comparing import run
from tfdist.placements import telling

BATCH = 4
EQUAL = "equal batches"  # of which it is told


def of(function):
    return lambda: keras.Sequential([layers.Dense(4), layers.Lambda(function), layers.Dense(3)])


def all_pairs(y, found):
    distances = ops.sum(ops.square(found[:, None] - found[None]), -1)
    return ops.maximum(1 + ops.mean(distances, 1) - 0.2 * ops.max(distances, 1), 0.0)


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


class Layer(layers.Layer):
    """Computes `function` of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.call = lambda x: function(x)


def of_layer(function):
    return lambda: keras.Sequential([layers.Dense(12), Layer(function), layers.Flatten(), layers.Dense(3)])


def sequence(x):
    return tf.reshape(x, (-1, 3, 4))


def time_major_attention(x):
    """Attends to the steps of a sequence in the order (time, rows, features), asked by its last one."""
    steps = tf.transpose(sequence(x), [1, 0, 2])
    weights = tf.nn.softmax(tf.transpose(tf.reduce_sum(steps * steps[-1], -1)))
    return tf.reduce_sum(steps * tf.transpose(weights)[..., None], 0)


def experts_of_tokens(x):
    """Three experts of which two are chosen for each token, in one einsum."""
    tokens, experts = sequence(x), tf.reshape(tf.range(48.0), (3, 4, 4)) / 48
    gates, chosen = tf.math.top_k(tf.nn.softmax(tokens[..., :3]), 2)
    return tf.einsum("bte,btd,edf->btf", tf.reduce_sum(tf.one_hot(chosen, 3) * gates[..., None], -2), tokens, experts)


def partition(y, found):
    """The log-partition function of a conditional random field, in a scan over time."""
    steps = tf.transpose(ops.stack([found, y, found * y], 1), [1, 0, 2])
    last = tf.scan(lambda before, step: tf.reduce_logsumexp(before[:, :, None], 1) + step, steps[1:], steps[0])[-1]
    return tf.reduce_logsumexp(last, 1)


def along_rows(y, found):
    return ops.mean(ops.abs(ops.sort(found, 0) - ops.sort(y, 0)), -1)


def partial_likelihood(y, found):
    """Cox's: of a row among all that come before it."""
    return ops.log(ops.cumsum(ops.exp(found[:, 0]))) - found[:, 0]


def shuffled(y, found):
    return ops.mean(ops.square(found - tf.gather(found, tf.random.shuffle(tf.range(tf.shape(found)[0])))), -1)


def shuffled_by_a_seed(y, found):
    order = tf.random.experimental.stateless_shuffle(tf.range(tf.shape(found)[0]), seed=(3, 4))
    return ops.mean(ops.square(found - tf.gather(found, order)), -1)


def pairs_by_einsum(y, found):
    return -tf.linalg.diag_part(tf.nn.log_softmax(tf.einsum("id,jd->ij", found, y)))


def neighbours(y, found):
    return ops.mean(ops.abs(found - y), -1) + ops.mean(ops.square(found[1:] - found[:-1]))


def halves(y, found):
    half = tf.shape(found)[0] // 2
    return ops.mean(ops.abs(found[:half] - found[half : 2 * half]), -1)


def from_the_first(y, found):
    return ops.mean(ops.abs(found - found[:1] - y), -1)


def from_the_one_row(y, found):
    return ops.mean(ops.abs(found - found[0] - y), -1)


def softmax_over_rows(y, found):
    return ops.mean(ops.softmax(found, axis=0) * ops.square(found - y), -1)


def from_the_mean_of_a_group(y, found):
    group = tf.cast(y[:, 0] > 0.5, tf.int32)
    return ops.mean(ops.square(found - tf.gather(tf.math.unsorted_segment_mean(found, group, 2), group)), -1)


def two_views(y, found):
    """The rows and their images, put together and taken apart again: each meets its own image."""
    both, rows = tf.concat([found, 0.9 * found], 0), tf.shape(y)[0]
    return ops.mean(ops.square(both[:rows] - both[rows:]), -1) + ops.mean(ops.square(found[: tf.shape(y)[0]] - y), -1)


def softmax_over_steps(x):
    return tf.nn.softmax(sequence(x), axis=1) * keras.ops.softmax(sequence(x), axis=-1)


def neighbouring_steps(x):
    return sequence(x)[:, 1:] - sequence(x)[:, :-1]


def synchronized():
    return keras.Sequential([layers.Dense(4), layers.BatchNormalization(synchronized=True), layers.Dense(3)])


def spectral():
    return keras.Sequential([layers.SpectralNormalization(layers.Dense(4)), layers.Dense(3)])


def fitted(strategy, build, loss, rows, told):
    """Returns what `fit` leaves behind, and adds what it warns of rows to `told`."""
    telling._told.clear()
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(rows, 8)).astype("float32"), rng.uniform(size=(rows, 3)).astype("float32")
    with strategy.scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.03), loss)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    told.extend(str(one.message) for one in found if "rows" in str(one.message))
    return {"history": history, **state(model)}


@pytest.mark.as_traced
@pytest.mark.parametrize("rows", [exhaustive(8), 11], ids=["equal batches", "a smaller last batch"])
@pytest.mark.parametrize(
    ("build", "loss", "told_of"),
    [
        (synchronized, "mse", None),
        exhaustive(plain, all_pairs, None),
        exhaustive(plain, next_row, None),
        exhaustive(plain, advantages, None),
        exhaustive(of(lambda x: x[::-1]), "mse", None),
        exhaustive(of(lambda x: x - ops.mean(x, 0)), "mse", None),
        (of(deviation), "mse", None),
        exhaustive(of_sequences, "cosine_similarity", None),
        exhaustive(attended, keras.losses.CategoricalCrossentropy(from_logits=True), None),
        exhaustive(of(lambda x: x - ops.mean(x, -1, keepdims=True)), "huber", None),
        exhaustive(of_layer(time_major_attention), "mse", None),
        exhaustive(of_layer(experts_of_tokens), "mse", None),
        exhaustive(of_layer(lambda x: ops.cumsum(sequence(x), 1) - ops.flip(ops.sort(sequence(x), 1), 1)), "mse", None),
        exhaustive(of_layer(lambda x: tf.gather(sequence(x), tf.argsort(x[:, :3], -1), batch_dims=1)), "mse", None),
        exhaustive(of_layer(lambda x: ops.einsum("btd,bsd->bts", sequence(x), sequence(x))), "mse", None),
        exhaustive(plain, partition, None),
        exhaustive(spectral, "mse", None),
        exhaustive(plain, along_rows, None),
        exhaustive(plain, partial_likelihood, None),
        exhaustive(plain, shuffled_by_a_seed, EQUAL),
        exhaustive(plain, pairs_by_einsum, None),
        (plain, neighbours, None),
        exhaustive(plain, halves, None),
        exhaustive(plain, from_the_first, None),
        exhaustive(plain, from_the_one_row, None),
        exhaustive(plain, softmax_over_rows, None),
        exhaustive(plain, from_the_mean_of_a_group, None),
        exhaustive(plain, two_views, None),
        exhaustive(of_layer(softmax_over_steps), "mse", None),
        exhaustive(of_layer(neighbouring_steps), "mse", None),
    ],
)
def test_they_are_exact_or_told(build, loss, told_of, rows):
    """The number of rows may be known when the step is traced, as it is where batches are equal."""
    told: list[str] = []

    def program(strategy):
        return fitted(strategy, build, loss, rows, told)

    expected, found = run(program, one_device()), run(program, strategy_for(2, 0))
    if told_of == EQUAL and rows % BATCH == 0:
        (message,) = told
        assert message.startswith("The loss ") and "rows that meet other rows" in message and "all_gather" in message
    else:
        assert not told
        assert_same_tree(found, expected, rtol=1e-4)


@pytest.mark.as_traced
@pytest.mark.parametrize("rows", [exhaustive(8), 11])
@pytest.mark.parametrize(("build", "loss"), [(normalized, "mse"), exhaustive(plain, shuffled)])
def test_what_devices_do_of_their_own(build, loss, rows):
    """Statistics of its own rows, as each device is to normalize by, or its own order of all rows: no numbers of one device."""
    told: list[str] = []
    found = run(lambda strategy: fitted(strategy, build, loss, rows, told), strategy_for(2, 0))
    assert not told
    assert np.isfinite(found["history"]["loss"]).all()
