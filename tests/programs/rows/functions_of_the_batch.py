"""Functions of a batch, by what they do with its rows and numbers: losses, metrics, statistics, changes of gradients, layers.

A function takes what its arguments' names say: `x`, inputs (rows, features); `y`, targets, and `p`, predictions (rows, units);
`model`, whose weights it reads, or of which it takes gradients; `layer`, the part of the model that has made `p`. It returns one
number, or a number for each row, of which the mean is meant. It is written as for one device, and bears a batch of one row,
unless `LEAST_ROWS` says otherwise.

As a script (see `python -m tests.programs.rows.functions_of_the_batch --help`) it runs them beside one device.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

ops = keras.ops
BATCH, SMALL = 8, 1e-3
FLOAT = tf.float64


@dataclasses.dataclass(frozen=True)
class Function:
    """One function: `kind` says which ways of training use it; `exact`, that a step must be right and say nothing.

    Of one that is not `exact` a step may warn, or be right.
    """

    name: str
    group: str
    kind: str
    compute: Callable[..., Any]
    exact: bool = True
    least_rows: int = 1
    ways: tuple[str, ...] = ()  # if not empty: only these

    def __call__(self, **given: Any) -> tf.Tensor:
        return self.compute(**{name: given[name] for name in inspect.signature(self.compute).parameters})

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.compute).parameters)


FUNCTIONS: dict[str, Function] = {}


def of(group: str, kind: str = "loss", **settings: Any) -> Callable[[Any], Any]:
    """Adds the function below to the group."""

    def add(compute: Any) -> Any:
        name = compute.__name__.rstrip("_")
        assert name not in FUNCTIONS, name
        FUNCTIONS[name] = Function(name, group, kind, compute, **settings)
        return compute

    return add


def rows_of(tensor):
    return tf.cast(tf.shape(tensor)[0], FLOAT)


def errors(y, p):
    """One for each row."""
    return tf.reduce_sum(tf.square(p - y), axis=-1)


def mse(y, p):
    return tf.reduce_mean(tf.square(p - y))


def positive(y):
    return tf.cast(y > 0, FLOAT)


def probabilities(p):
    return tf.sigmoid(2.0 * p)


# Means, and what is linear in them: nothing is to be repaired.


@of("means")
def mean(y, p):
    return mse(y, p)


@of("means")
def mean_of_rows(y, p):
    return errors(y, p)


@of("means")
def sum_over_counted_rows(y, p):
    return 0.3 * tf.reduce_sum(errors(y, p)) / rows_of(p)


@of("means")
def mean_and_penalty(y, p, layer):
    return mse(y, p) + 0.1 * tf.exp(tf.reduce_mean(tf.square(layer.kernel)))


@of("means")
def einsum_over_rows(y, p):
    return tf.einsum("ik,ik->", p - y, p) / rows_of(p)


@of("means")
def mean_of_stacked_tasks(y, p):
    tasks = [tf.reduce_mean(tf.square(p[:, i] - y[:, i])) for i in range(p.shape[1])]
    return tf.reduce_sum(tf.stack(tasks) * tf.constant([1.0 + i for i in range(p.shape[1])], FLOAT))


@of("means")
def nine_hundred_terms(y, p):
    total, terms = mse(y, p), [tf.reduce_mean(p[:, i]) for i in range(p.shape[1])]
    for i in range(899):
        total = total + terms[i % len(terms)]
    return total / 900.0


@of("means")
def gradient_penalty(x, y, p, model, layer):
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = tf.reduce_sum(layer(x), -1)
    slopes = tape.gradient(found, x)
    return mse(y, p) + 0.1 * tf.reduce_mean(tf.square(tf.norm(slopes, axis=-1) - 1.0))


# Numbers of the batch that a function makes one number of.


@of("numbers")
def rmse(y, p):
    return tf.sqrt(mse(y, p))


@of("numbers")
def root_of_a_sum_over_rows(y, p):
    return (tf.reduce_sum(errors(y, p)) / rows_of(p) + SMALL) ** 0.5


@of("numbers")
def log_of_the_mean(y, p):
    return tf.math.log(mse(y, p) + 0.1)


@of("numbers")
def log1p_of_the_mean(y, p):
    return ops.log1p(ops.mean(ops.square(p - y)))


@of("numbers")
def exp_of_the_mean(y, p):
    return -tf.exp(-mse(y, p))


@of("numbers")
def peak_signal_to_noise(y, p):
    return -10.0 * tf.math.log(4.0 / mse(y, p)) / math.log(10.0) / 10.0


@of("numbers")
def power_of_the_mean(y, p):
    return tf.pow(mse(y, p), 1.7)


@of("numbers")
def reciprocal_of_the_mean(y, p):
    return -1.0 / (1.0 + mse(y, p))


@of("numbers")
def arctangent_of_the_mean(y, p):
    return tf.atan(2.0 * mse(y, p))


@of("numbers")
def lgamma_of_the_mean(y, p):
    return tf.math.lgamma(1.5 + 2.0 * mse(y, p))


@of("numbers")
def sinh_of_the_mean(y, p):
    return tf.sinh(mse(y, p))


@of("numbers")
def tanh_of_the_mean(y, p):
    return tf.tanh(mse(y, p))


@of("numbers")
def erf_and_softplus_of_means(y, p):
    return tf.math.erf(mse(y, p)) + tf.nn.softplus(tf.reduce_mean(p))


@of("numbers")
def sum_by_a_constant(y, p):
    return tf.reduce_sum(errors(y, p)) / float(BATCH)


@of("numbers")
def sum_by_nothing(y, p):
    return 0.2 * ops.sum(errors(y, p))


@of("numbers")
def half_a_sum_of_squares(y, p):
    return 0.2 * tf.nn.l2_loss(p - y)


@of("numbers")
def sum_over_the_root_of_rows(y, p):
    return tf.reduce_sum(errors(y, p)) / tf.sqrt(rows_of(p)) / 5.5


@of("numbers")
def mean_times_log_of_rows(y, p):
    return mse(y, p) * tf.math.log(1.0 + rows_of(p))


@of("numbers")
def sum_and_mean(y, p):
    return 0.05 * tf.reduce_sum(tf.abs(p - y)) + mse(y, p)


@of("numbers")
def mean_and_root(y, p):
    return mse(y, p) + tf.sqrt(mse(y, p)) + 0.1 * tf.reduce_mean(tf.abs(p))


@of("numbers")
def mean_root_and_penalty(y, p, layer):
    return mse(y, p) + tf.sqrt(mse(y, p)) + 0.1 * tf.nn.l2_loss(layer.kernel)


@of("numbers")
def product_of_two_means(y, p):
    return mse(y, p) * tf.reduce_mean(tf.abs(p) + 0.3)


@of("numbers")
def square_of_the_mean(y, p):
    return tf.square(tf.reduce_mean(p - y) + 0.5)


@of("numbers")
def penalty_times_the_mean(y, p, layer):
    return mse(y, p) * (1.0 + tf.reduce_mean(tf.square(layer.kernel)))


@of("numbers")
def penalty_times_the_root(y, p, layer):
    return tf.sqrt(mse(y, p)) * (1.0 + tf.reduce_mean(tf.square(layer.kernel)))


@of("numbers")
def root_of_mean_and_penalty(y, p, layer):
    return tf.sqrt(mse(y, p) + 0.1 * tf.nn.l2_loss(layer.kernel))


@of("numbers")
def dice(y, p):
    y, p = positive(y), probabilities(p)
    return 1.0 - 2.0 * tf.reduce_sum(y * p) / (tf.reduce_sum(y) + tf.reduce_sum(p) + SMALL)


@of("numbers")
def dice_of_classes(y, p):
    y, p = positive(y), probabilities(p)
    return 1.0 - tf.reduce_mean((2.0 * tf.reduce_sum(y * p, 0) + 1.0) / (tf.reduce_sum(y + p, axis=0) + 1.0))


@of("numbers")
def tversky(y, p):
    y, p = positive(y), probabilities(p)
    hits, misses, alarms = tf.reduce_sum(y * p), tf.reduce_sum(y * (1.0 - p)), tf.reduce_sum((1.0 - y) * p)
    return (1.0 - hits / (hits + 0.7 * misses + 0.3 * alarms + SMALL)) ** 0.75


@of("numbers")
def jaccard(y, p):
    y, p = ops.reshape(positive(y), (-1,)), ops.reshape(probabilities(p), (-1,))
    both = ops.sum(y * p)
    return 1.0 - (both + 1.0) / (ops.sum(y) + ops.sum(p) - both + 1.0)


@of("numbers")
def soft_f1(y, p):
    y, p = positive(y), probabilities(p)
    hits = tf.reduce_sum(y * p, axis=0)
    precision, recall = hits / (tf.reduce_sum(p, axis=0) + SMALL), hits / (tf.reduce_sum(y, axis=0) + 1.0)
    return 1.0 - tf.reduce_mean(2.0 * precision * recall / (precision + recall + SMALL))


@of("numbers")
def masked_mean(x, y, p):
    mask = positive(x[:, 0])
    return tf.reduce_sum(errors(y, p) * mask) / tf.reduce_sum(mask)


@of("numbers")
def masked_mean_of_entries(y, p):
    mask = positive(y + 0.3)
    return tf.math.divide_no_nan(tf.reduce_sum(tf.abs(p - y) * mask), tf.maximum(tf.reduce_sum(mask), 1.0))


@of("numbers")
def weighted_mean(x, y, p):
    weights = tf.exp(x[:, 1])
    return tf.reduce_sum(weights * errors(y, p)) / tf.reduce_sum(weights)


@of("numbers")
def mean_of_selected_rows(x, y, p):
    return tf.reduce_mean(tf.boolean_mask(errors(y, p), x[:, 0] > 0))


@of("numbers")
def mean_of_gathered_rows(x, y, p):
    found = tf.where(x[:, 0] > 0)[:, 0]
    return tf.reduce_mean(tf.square(tf.gather(p, found) - tf.gather(y, found)))


@of("numbers")
def root_of_selected_rows(x, y, p):
    found = tf.where(x[:, 0] > 0)
    return tf.sqrt(tf.reduce_mean(tf.square(tf.gather_nd(p, found) - tf.gather_nd(y, found))))


@of("numbers")
def mean_of_selected_entries(y, p):
    kept = tf.boolean_mask(tf.square(p - y), y > -0.5)
    return tf.reduce_sum(kept) / (tf.cast(tf.size(kept), FLOAT) + 1.0)


@of("numbers")
def mean_of_partitions(x, y, p):
    parts = tf.dynamic_partition(errors(y, p), tf.cast(x[:, 0] > 0, tf.int32), 2)
    return tf.add_n([tf.reduce_sum(part) / (1.0 + tf.cast(tf.size(part), FLOAT)) for part in parts])


@of("numbers")
def nonzero_mean(y, p):
    """Triplets that are not easy: the sum of the hinges over how many are not zero."""
    hinges = tf.maximum(errors(y, p) - 0.5, 0.0)
    return tf.reduce_sum(hinges) / (tf.cast(tf.math.count_nonzero(hinges), FLOAT) + SMALL)


@of("numbers")
def balanced_by_class(y, p):
    means = tf.math.unsorted_segment_mean(errors(y, p), tf.argmax(y, -1), y.shape[1])
    return tf.reduce_mean(means)


@of("numbers")
def balanced_by_sums_of_segments(y, p):
    kinds = tf.cast(tf.argmax(y, -1), tf.int32)
    sums = tf.math.unsorted_segment_sum(errors(y, p), kinds, y.shape[1])
    counts = tf.math.unsorted_segment_sum(tf.ones_like(p[:, 0]), kinds, y.shape[1])
    return tf.reduce_mean(sums / (counts + 1.0))


@of("numbers")
def correlation(y, p):
    y, p = y - tf.reduce_mean(y), p - tf.reduce_mean(p)
    return 1.0 - tf.reduce_sum(y * p) / tf.sqrt(tf.reduce_sum(y**2) * tf.reduce_sum(p**2) + SMALL)


@of("numbers")
def correlation_of_moments(y, p):
    both = tf.reduce_mean(y * p) - tf.reduce_mean(y) * tf.reduce_mean(p)
    mine = tf.reduce_mean(p * p) - tf.reduce_mean(p) ** 2
    return -both * tf.math.rsqrt(mine * tf.math.reduce_variance(y) + SMALL)


@of("numbers")
def concordance(y, p):
    (m, v), (n, w) = tf.nn.moments(y, axes=[0]), tf.nn.moments(p, axes=[0])
    both = tf.reduce_mean((y - m) * (p - n), axis=0)
    return tf.reduce_mean(1.0 - 2.0 * both / (v + w + tf.square(m - n) + SMALL))


@of("numbers")
def explained_variance(y, p):
    return tf.reduce_sum(tf.square(y - p)) / (tf.reduce_sum(tf.square(y - tf.reduce_mean(y, axis=0))) + 1.0)


@of("numbers")
def variance_of_predictions(p):
    return tf.reduce_mean(tf.math.reduce_variance(p - 0.5 * tf.square(p), axis=0)) - tf.reduce_mean(ops.var(p, axis=0)) / 3.0


@of("numbers")
def hinge_of_deviations(y, p):
    """The variance term of VICReg."""
    deviations = tf.sqrt(tf.math.reduce_variance(p, axis=0) + SMALL)
    return tf.reduce_mean(tf.nn.relu(1.0 - deviations)) + mse(y, p)


@of("numbers")
def covariance(p):
    """The covariance term of VICReg."""
    centred = p - tf.reduce_mean(p, axis=0)
    found = tf.matmul(centred, centred, transpose_a=True) / rows_of(p)
    return tf.reduce_sum(tf.square(found - tf.linalg.diag(tf.linalg.diag_part(found)))) - tf.linalg.trace(found)


@of("numbers")
def cross_correlation(y, p):
    """Barlow Twins."""
    one, other = ((z - tf.reduce_mean(z, 0)) / tf.sqrt(tf.math.reduce_variance(z, 0) + 0.01) for z in (y, p))
    found = tf.transpose(one) @ other / rows_of(p)
    return tf.reduce_mean(tf.square(found - tf.eye(p.shape[1], dtype=FLOAT)))


@of("numbers")
def gram_matrices(y, p):
    mine, theirs = (tf.einsum("ni,nj->ij", z, z) / rows_of(z) for z in (p, y))
    return tf.reduce_sum(tf.square(mine - theirs))


@of("numbers")
def log_determinant(p):
    """The coding rate of the features (MCR2)."""
    found = tf.eye(p.shape[1], dtype=FLOAT) + 2.0 * tf.matmul(p, p, transpose_a=True) / rows_of(p)
    return -tf.linalg.logdet(found)


@of("numbers")
def eigenvalues(p):
    values = tf.linalg.eigvalsh(tf.tensordot(p, p, [[0], [0]]) / rows_of(p))
    return tf.reduce_max(values) - tf.reduce_mean(tf.math.log(values + 0.1))


@of("numbers")
def aligned_kernels(y, p):
    """Centred kernel alignment, linear."""
    y, p = y - tf.reduce_mean(y, 0), p - tf.reduce_mean(p, 0)
    both, mine, theirs = (tf.norm(tf.transpose(one) @ other) for one, other in ((p, y), (p, p), (y, y)))
    return -(both**2) / (mine * theirs + SMALL)


@of("numbers")
def flooding(y, p):
    return tf.abs(mse(y, p) - 0.3) + 0.3


@of("numbers")
def free_bits(y, p):
    bits = tf.reduce_mean(tf.square(p) - tf.math.log(tf.square(p) + 0.1), axis=0)
    return mse(y, p) + tf.reduce_sum(tf.maximum(bits, 1.5))


@of("numbers")
def where_of_the_mean(y, p):
    found = mse(y, p)
    return tf.where(found < 0.55, 0.5 * found, 2.0 * found)


@of("numbers")
def cond_of_the_mean(y, p):
    found = mse(y, p)
    return tf.cond(found < 0.55, lambda: 0.5 * found, lambda: 3.0 * found)


@of("numbers")
def switch_of_the_mean(y, p):
    found = mse(y, p)
    branches = [lambda: 0.5 * found, lambda: found * found, lambda: tf.sqrt(found)]
    return tf.switch_case(tf.cast(found * 4.0, tf.int32), branches, default=lambda: 3.0 * found)


@of("numbers")
def mean_times_its_root(y, p):
    """The mean itself need not be agreed on, and of no rows is NaN."""
    return mse(y, p) * tf.sqrt(mse(y, p))


@of("numbers")
def clip_of_the_mean(y, p):
    return tf.clip_by_value(tf.reduce_mean(tf.square(p - y), axis=0), 0.45, 0.65)[0] + 0.1 * mse(y, p)


@of("numbers")
def huber_of_the_mean(y, p):
    return keras.losses.huber(tf.reduce_mean(y, 0) + 1.0, tf.reduce_mean(p, 0), delta=0.9)


@of("numbers")
def loop_on_the_mean(y, p):
    """Newton's root: a loop that is given a number of the batch."""
    found = mse(y, p) + 0.1
    return tf.while_loop(lambda i, z: i < 4, lambda i, z: (i + 1, 0.5 * (z + found / z)), (tf.constant(0), found))[1]


@of("numbers")
def scan_of_tasks(y, p):
    """Of a list of means, whose first element begins the loop."""
    return tf.reduce_sum(tf.scan(lambda before, task: 0.5 * before + task * task, tf.reduce_mean(tf.square(p - y), 0)))


@of("numbers")
def spectrum_of_the_mean(p):
    """Complex numbers."""
    return tf.reduce_sum(tf.abs(tf.signal.fft(tf.cast(tf.reduce_mean(p, 0), tf.complex128))))


@of("numbers")
def focal_by_the_mean(y, p):
    right = tf.reduce_mean(tf.exp(-errors(y, p)))
    return -((1.0 - right) ** 2) * tf.math.log(right)


@of("numbers")
def largest_task(y, p):
    return tf.reduce_max(tf.reduce_mean(tf.square(p - y), axis=0))


@of("numbers")
def logsumexp_of_tasks(y, p):
    return tf.reduce_logsumexp(3.0 * tf.reduce_mean(tf.square(p - y), axis=0)) / 3.0


@of("numbers")
def softmax_of_tasks(y, p):
    tasks = tf.reduce_mean(tf.square(p - y), axis=0)
    return tf.reduce_sum(tf.nn.softmax(tf.stop_gradient(tasks) / 0.2) * tasks)


@of("numbers")
def product_of_tasks(y, p):
    return tf.reduce_prod(0.5 + tf.reduce_mean(tf.square(p - y), axis=0))


@of("numbers")
def roots_of_stacked_tasks(y, p):
    tasks = tf.stack([tf.reduce_mean(tf.square(p[:, i] - y[:, i])) for i in range(p.shape[1])])
    return tf.reduce_mean(tf.sqrt(tasks) * tf.constant([1.0 + i for i in range(p.shape[1])], FLOAT))


@of("numbers")
def nine_hundred_terms_of_a_root(y, p):
    total = found = tf.sqrt(mse(y, p))
    terms = [found * tf.reduce_mean(p[:, i]) for i in range(p.shape[1])]
    for i in range(899):
        total = total + terms[i % len(terms)]
    return total / 900.0


@of("numbers")
def max_of_the_rows(y, p):
    return tf.reduce_max(errors(y, p))


@of("numbers")
def min_of_the_rows(y, p):
    return ops.min(ops.sum(ops.square(p + y), axis=-1)) - ops.mean(ops.min(p, axis=0))


@of("numbers")
def max_over_the_mean(y, p):
    return tf.reduce_max(errors(y, p)) / (tf.reduce_mean(errors(y, p)) + 0.1)


@of("numbers")
def range_of_the_rows(p):
    return tf.reduce_sum(tf.abs(1.5 + tf.reduce_max(p, axis=0) - tf.reduce_min(p, axis=0)))


@of("numbers")
def largest_absolute_value(p, y):
    return tf.norm(p - y, ord=np.inf)


@of("numbers")
def product_of_the_rows(y, p):
    return tf.math.log(tf.reduce_prod(1.0 + errors(y, p)))


@of("numbers")
def norm(y, p):
    return 0.3 * tf.norm(p - y)


@of("numbers")
def norm_by_keras(y, p):
    return 0.2 * ops.norm(ops.reshape(p - y, (-1,)), ord=1) + 0.1 * ops.norm(p + y)


@of("numbers")
def power_mean(y, p):
    return tf.reduce_mean(errors(y, p) ** 3.0) ** (1.0 / 3.0)


@of("numbers")
def logsumexp_of_the_rows(y, p):
    return tf.reduce_logsumexp(errors(y, p))


@of("numbers")
def geometric_mean(y, p):
    return tf.exp(tf.reduce_mean(tf.math.log(errors(y, p) + 0.1)))


@of("numbers")
def harmonic_mean(y, p):
    return rows_of(p) / tf.reduce_sum(1.0 / (errors(y, p) + 0.1))


@of("numbers")
def coefficient_of_variation(y, p):
    found = errors(y, p)
    return tf.sqrt(tf.math.reduce_variance(found) + SMALL) / tf.reduce_mean(found) + 0.1 * tf.reduce_mean(found)


@of("numbers")
def deviation_of_the_rows(y, p):
    return tf.math.reduce_std(tf.concat([errors(y, p), -errors(y, p)], 0))


@of("numbers")
def scale_invariant_logs(y, p):
    """Eigen's depth loss."""
    away = tf.math.log(1.5 + p) - tf.math.log(3.0 + y)
    return tf.sqrt(tf.reduce_mean(away**2) - 0.85 * tf.reduce_mean(away) ** 2 + SMALL)


@of("numbers")
def cosine_of_the_batch(y, p):
    return 1.0 - tf.reduce_sum(tf.math.l2_normalize(y) * tf.math.l2_normalize(p))


@of("numbers")
def matched_means(y, p):
    return tf.reduce_sum(tf.square(tf.reduce_mean(p, 0) - tf.reduce_mean(y, 0) - 0.5))


@of("numbers")
def calibration(y, p):
    """Soft bins: of each, how far what was said is from what was so."""
    said, so = probabilities(p)[:, 0], positive(y)[:, 0]
    bins = tf.nn.softmax(-10.0 * tf.square(said[:, None] - tf.constant([0.2, 0.5, 0.8], FLOAT)))
    return tf.reduce_sum(tf.abs(tf.linalg.matvec(bins, said - so, transpose_a=True))) / rows_of(p)


@of("numbers")
def separated_scores(y, p):
    """Smooth: how far the mean score of the positives is from that of the others."""
    kinds = positive(y)
    high = tf.reduce_sum(p * kinds) / (tf.reduce_sum(kinds) + 1.0)
    low = tf.reduce_sum(p * (1.0 - kinds)) / (tf.reduce_sum(1.0 - kinds) + 1.0)
    return tf.sigmoid(low - high) + tf.square(high - 0.5)


@of("numbers")
def entropy_of_the_mean(p):
    """Information maximization."""
    of_rows = tf.nn.softmax(2.0 * p)
    of_all = tf.reduce_mean(of_rows, axis=0)
    own = -tf.reduce_mean(tf.reduce_sum(of_rows * tf.math.log(of_rows), -1))
    return own + tf.reduce_sum(of_all * tf.math.log(of_all))


@of("numbers")
def divergence_from_a_prior(p):
    prior = tf.nn.softmax(tf.range(p.shape[1], dtype=FLOAT))
    of_all = tf.reduce_mean(tf.nn.softmax(3.0 * p), axis=0)
    return tf.reduce_sum(of_all * tf.math.log(of_all / prior))


@of("numbers")
def sparse_activations(y, p):
    """A sparse autoencoder's penalty."""
    active = tf.reduce_mean(probabilities(p), axis=0)
    return mse(y, p) + 0.2 * tf.reduce_sum(0.1 * tf.math.log(0.1 / active) + 0.9 * tf.math.log(0.9 / (1.0 - active)))


@of("numbers")
def balanced_experts(p):
    """The auxiliary loss of a mixture of experts: the fraction of rows of an expert times its mean gate."""
    gates = tf.nn.softmax(2.0 * p)
    fractions = tf.reduce_mean(tf.one_hot(tf.argmax(gates, -1), p.shape[1], dtype=FLOAT), axis=0)
    return p.shape[1] * tf.reduce_sum(fractions * tf.reduce_mean(gates, axis=0))


@of("numbers")
def variation_of_importance(p):
    importance = tf.reduce_sum(tf.nn.softmax(2.0 * p), axis=0)
    return 3.0 * tf.math.reduce_variance(importance) / tf.square(tf.reduce_mean(importance)) + tf.reduce_mean(p)


@of("numbers")
def root_of_a_gradient_penalty(x, y, p, layer):
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = tf.reduce_sum(layer(x), -1)
    return tf.sqrt(tf.reduce_mean(tf.square(tape.gradient(found, x))) + SMALL) + mse(y, p)


@of("numbers")
def gradient_of_a_root(x, y, p, layer):
    """A gradient by rows of a number of the batch."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = tf.sqrt(tf.reduce_mean(tf.square(layer(x))) + SMALL)
    return mse(y, p) + 10.0 * tf.reduce_sum(tf.square(tape.gradient(found, x)))


@of("numbers")
def slope_by_a_factor(y, p):
    """Invariant risk: the derivative of a mean by a factor of 1, squared, and by one for each column."""
    one, each = tf.ones([], p.dtype), tf.ones([p.shape[-1]], p.dtype)
    with tf.GradientTape() as tape:
        tape.watch([one, each])
        risk = mse(y, one * each * p)
    slope, slopes = tape.gradient(risk, [one, each])
    return mse(y, p) + 0.5 * tf.square(slope) + tf.norm(slopes)


@of("numbers")
def norm_of_the_gradient(x, y, p, layer):
    """A gradient of a weight, of a mean, that is differentiated."""
    with tf.GradientTape() as tape:
        found = mse(y, layer(x))
    return mse(y, p) + 0.5 * tf.reduce_sum(tf.square(tape.gradient(found, layer.kernel)))


@of("numbers")
def norm_of_the_gradient_of_a_root(x, y, p, layer):
    with tf.GradientTape() as tape:
        found = tf.sqrt(mse(y, layer(x)))
    return mse(y, p) + 0.5 * tf.norm(tape.gradient(found, layer.kernel))


@of("numbers")
def rows_times_the_norm_of_the_gradient(x, y, p, layer):
    """What comes back to the gradient is of a rank's own rows."""
    with tf.GradientTape() as tape:
        found = tf.sqrt(mse(y, layer(x)))
    slope = tf.norm(tape.gradient(found, layer.kernel))
    return mse(y, p) * slope + tf.reduce_mean(p[:, 0] * tf.square(slope))


@of("numbers")
def largest_row_times_the_norm_of_the_gradient(x, y, p, layer):
    with tf.GradientTape() as tape:
        found = tf.sqrt(mse(y, layer(x)))
    return tf.reduce_max(p[:, 0] * tf.norm(tape.gradient(found, layer.kernel)))


def _gradient(x, y, layer):
    with tf.GradientTape() as tape:
        found = mse(y, layer(x))
    return tape.gradient(found, layer.kernel)


@of("numbers")
def rows_by_the_gradient(x, y, p, layer):
    """Linear in the gradient, each rank's of its own rows: the sum is wanted."""
    return tf.reduce_mean(x @ _gradient(x, y, layer))


@of("numbers")
def mean_of_the_gradient(x, y, p, layer):
    """Linear in the gradient, and in nothing else."""
    return 2.0 * tf.reduce_mean(_gradient(x, y, layer))


@of("numbers")
def sum_and_the_mean_of_the_gradient(x, y, p, layer):
    return tf.reduce_sum(tf.square(p - y)) + tf.reduce_mean(_gradient(x, y, layer))


@of("numbers")
def largest_row_and_the_mean_of_the_gradient(x, y, p, layer):
    return tf.reduce_max(p) + 3.0 * tf.reduce_mean(_gradient(x, y, layer))


@of("numbers")
def largest_row_times_the_mean_of_the_gradient(x, y, p, layer):
    """What backward compares with the largest is what forward has computed, to the last bit."""
    return tf.reduce_max(p[:, 0] * tf.reduce_mean(_gradient(x, y, layer))) + 0.1 * mse(y, p)


@of("numbers")
def gradient_or_the_largest(x, y, p, layer):
    by_the_kernel = tf.reduce_sum(layer.kernel * _gradient(x, y, layer))
    largest = tf.reduce_max(p)
    return tf.cond(largest > by_the_kernel, lambda: largest * largest, lambda: by_the_kernel)


@of("numbers")
def largest_row_and_a_choice_of_the_gradient(x, y, p, layer):
    """A maximum, to which what is chosen of a gradient and of a mean is added."""
    largest = tf.reduce_max(p[:, 0] * tf.reduce_mean(tf.square(layer(x))))
    by_the_kernel, mean = tf.reduce_sum(layer.kernel * _gradient(x, y, layer)), tf.reduce_mean(tf.square(layer(x)))
    return largest + tf.cond(by_the_kernel > mean, lambda: by_the_kernel * by_the_kernel, lambda: mean)


@of("numbers")
def rows_by_the_gradient_over_rows(x, y, p, layer):
    return tf.reduce_sum(x @ _gradient(x, y, layer)) / tf.reduce_sum(tf.abs(x))


@of("numbers")
def root_of_rows_scaled_by_the_gradient(x, y, p, layer):
    scale = tf.reduce_sum(tf.square(_gradient(x, y, layer)))
    return tf.sqrt(tf.reduce_mean(tf.square(p * scale)) + SMALL)


@of("numbers")
def largest_and_the_norm_of_its_gradient(x, y, p, layer):
    """What comes back to the gradient is of the rank that has the largest."""
    with tf.GradientTape() as tape:
        found = tf.reduce_max(tf.square(y - layer(x)))
    return found + 0.1 * tf.norm(tape.gradient(found, layer.kernel))


@of("numbers")
def norm_of_the_gradient_of_pairs(x, y, p, layer):
    """Rows that were gathered, twice back."""
    with tf.GradientTape() as tape:
        z = layer(x)
        found = tf.reduce_mean(tf.exp(-tf.reduce_sum(tf.square(z[:, None] - z[None]), -1)))
    # Of one row the gradient is zero, where a norm has no derivative.
    return mse(y, p) + tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(found, layer.kernel))) + 1e-2)


@of("numbers")
def norm_over_maxima(x, y, p, layer):
    """Numbers of all rows that go back to each, twice back; how many they are is known when the step runs."""
    with tf.GradientTape() as tape:
        some = tf.boolean_mask(layer(x), tf.range(y.shape[1]) % 2 == 0, axis=1)
        some = some / (1.0 + tf.reduce_max(tf.square(some), 0)) - tf.reduce_mean(some, 0)
        found = tf.reduce_mean(tf.exp(-tf.reduce_sum(tf.square(some), -1)))
    return mse(y, p) + tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(found, layer.kernel))) + 1e-2)


@of("numbers")
def of_checked_labels(y, p):
    """Assertions have side effects."""
    labels = tf.argmax(y, -1)
    for check, limit in ((tf.debugging.assert_greater_equal, 0), (tf.debugging.assert_less, y.shape[1])):
        with tf.control_dependencies([check(labels, tf.constant(limit, tf.int64))]):
            labels = tf.identity(labels)
    return tf.sqrt(mse(y, p) * (1.5 + tf.reduce_mean(tf.cast(labels, FLOAT))))


@of("numbers")
def keras_sum_of_means(y, p):
    means = (tf.reduce_mean(z, 0, keepdims=True) for z in (y, p))
    return keras.losses.MeanSquaredError(reduction="sum")(*means)


@of("numbers")
def keras_cosine_of_columns(y, p):
    """A number for each column, of all rows."""
    return keras.losses.CosineSimilarity(axis=0)(y, p)


@of("means")
def keras_mean_over_columns(y, p):
    return keras.losses.MeanSquaredError()(tf.transpose(y), tf.transpose(p))


@of("meeting")
def keras_sum_of_pairs(p):
    products = p @ tf.transpose(p)
    return 0.1 * keras.losses.MeanSquaredError(reduction="sum")(tf.zeros_like(products), products)


@of("meeting")
def pairs_of_complex_rows(y, p):
    rows = tf.complex(p, y)
    return 0.1 * tf.reduce_mean(tf.square(tf.abs(rows @ tf.linalg.adjoint(rows))))


@of("meeting")
def logsumexp_of_pairs(y, p):
    """TensorFlow's looks at the shape of the number that it has."""
    return tf.reduce_logsumexp(p @ tf.transpose(y))


@of("meeting")
def mean_of_integers(x, y, p):
    """It is rounded down."""
    return mse(y, p) * (1.0 + 0.1 * tf.cast(tf.reduce_mean(tf.cast(10.0 * tf.abs(x[:, 0]), tf.int64)), FLOAT))


@of("numbers")
def detached_root(y, p):
    return mse(y, p) * tf.sqrt(tf.stop_gradient(mse(y, p)))


@of("numbers")
def custom_gradient_of_the_mean(y, p):
    @tf.custom_gradient
    def bent(z):
        return z, lambda upstream: upstream * (1.0 + z)

    return tf.square(bent(mse(y, p)))


@of("numbers")
def loss_function_of_a_nested_function(y, p):
    return tf.function(lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(p - y))))(y, p)


@of("numbers")
def root_in_half_precision(y, p):
    found = tf.reduce_mean(tf.square(tf.cast(p - y, tf.float32)))
    return tf.cast(tf.sqrt(found), FLOAT)


# Numbers of the batch that meet its rows again.


@of("rows")
def centred_rows(y, p):
    return tf.reduce_sum(tf.square(p - tf.reduce_mean(p, axis=0) - y), -1)


@of("rows")
def standardised_rows(y, p):
    standardised = (p - tf.reduce_mean(p, 0)) / (tf.math.reduce_std(tf.concat([p, p + 0.1], 0), 0) + 0.1)
    return tf.reduce_sum(tf.square(standardised - y), -1)


@of("rows")
def rows_over_their_mean(y, p):
    found = errors(y, p) + 0.1
    return tf.square(found / tf.reduce_mean(found)) + 0.5 * found


@of("rows")
def weighted_by_exponentials(y, p):
    found = errors(y, p)
    return tf.exp(-(found - tf.reduce_mean(found))) * found


@of("rows")
def softmax_weights_through_sums(y, p):
    found = errors(y, p)
    weights = tf.exp(found) / tf.reduce_sum(tf.exp(found))
    return tf.reduce_sum(tf.stop_gradient(weights) * found)


@of("rows")
def softmax_weights(y, p):
    found = errors(y, p)
    return tf.reduce_sum(tf.nn.softmax(found, axis=0) * found)


@of("rows")
def softmax_over_the_rows(y, p):
    return tf.reduce_sum(tf.nn.softmax(2.0 * p, axis=0) * tf.square(p - y), -1) * 4.0


@of("rows")
def log_softmax_over_the_rows(y, p):
    return -tf.reduce_sum(positive(y) * ops.log_softmax(2.0 * p, axis=0), -1) + errors(y, p)


@of("rows")
def over_its_detached_mean(y, p):
    found = errors(y, p)
    return found / tf.stop_gradient(tf.reduce_mean(found))


@of("rows")
def standardised_advantages(x, y, p):
    advantages = (y[:, 0] - ops.mean(y[:, 0])) / (ops.std(y[:, 0] + x[:, 1]) + 0.1)
    return -advantages * ops.log_softmax(p)[:, 0] + 0.1 * errors(y, p)


@of("rows")
def learnt_advantages(y, p):
    values = p[:, 0] * y[:, 0] + p[:, 1]
    advantages = tf.stop_gradient((values - tf.reduce_mean(values)) / (tf.sqrt(tf.math.reduce_variance(values)) + 0.1))
    return (0.2 - advantages) * tf.nn.log_softmax(p)[:, 1] + 0.1 * errors(y, p)


@of("rows")
def above_the_mean(y, p):
    found = errors(y, p)
    return tf.where(found > tf.reduce_mean(found) - 0.1, found, tf.zeros_like(found)) + 0.1 * found


@of("rows")
def hinge_at_the_mean(y, p):
    found = errors(y, p)
    return tf.nn.relu(found - 0.7 * tf.reduce_mean(found))


@of("rows")
def hard_rows(y, p):
    found = errors(y, p)
    return found * tf.stop_gradient(found / tf.reduce_max(found))


@of("rows")
def selected_above_the_mean(y, p):
    found = errors(y, p)
    return tf.reduce_mean(tf.boolean_mask(found, found >= tf.reduce_mean(found)))


@of("rows")
def without_outliers(y, p):
    found = errors(y, p)
    mean, variance = tf.nn.moments(found, [0])
    kept = tf.stop_gradient(tf.cast(found <= mean + 0.5 * tf.sqrt(variance), FLOAT))
    return tf.reduce_sum(kept * found) / tf.reduce_sum(kept)


@of("rows")
def scaled_to_the_range(y, p):
    low, high = tf.reduce_min(p, 0), tf.reduce_max(p, 0)
    return tf.reduce_sum(tf.square((p - low) / (high - low + 0.5) - y), -1)


@of("rows")
def weighted_by_class_counts(y, p):
    kinds = tf.one_hot(tf.argmax(y, -1), y.shape[1], dtype=FLOAT)
    weights = rows_of(p) / (tf.reduce_sum(kinds, 0) + 1.0)
    return tf.linalg.matvec(kinds, weights) * errors(y, p)


@of("rows")
def weighted_by_gathered_counts(y, p):
    kinds = tf.argmax(y, -1)
    counts = tf.math.bincount(tf.cast(kinds, tf.int32), minlength=y.shape[1], dtype=FLOAT)
    return errors(y, p) / tf.gather(counts, kinds)


@of("rows")
def from_the_mean_of_a_class(y, p):
    kinds = tf.argmax(y, -1)
    centres = tf.math.unsorted_segment_mean(p, kinds, y.shape[1])
    return tf.reduce_sum(tf.square(p - tf.gather(centres, kinds)), -1) + errors(y, p)


@of("rows")
def mahalanobis(y, p):
    centred = p - tf.reduce_mean(p, 0)
    found = tf.matmul(centred, centred, transpose_a=True) / rows_of(p) + 0.5 * tf.eye(p.shape[1], dtype=FLOAT)
    return tf.reduce_sum(tf.matmul(y - p, tf.linalg.inv(found)) * (y - p), -1)


@of("rows")
def whitened(y, p):
    centred = p - tf.reduce_mean(p, 0)
    found = tf.matmul(centred, centred, transpose_a=True) / rows_of(p) + 0.3 * tf.eye(p.shape[1], dtype=FLOAT)
    factor = tf.linalg.cholesky(found)
    return errors(y, tf.transpose(tf.linalg.triangular_solve(factor, tf.transpose(centred))))


@of("rows")
def towards_the_mean_direction(y, p):
    mean = tf.math.l2_normalize(tf.reduce_mean(p + y, axis=0))
    return -tf.linalg.matvec(tf.math.l2_normalize(p - 2.0, axis=-1), mean)


@of("rows")
def relativistic(y, p):
    real, fake = p[:, 0], tf.reduce_sum(p * y, -1)
    return tf.nn.softplus(tf.reduce_mean(fake) - real) + tf.nn.softplus(fake - tf.reduce_mean(real))


@of("rows")
def batch_normalised(y, p):
    mean, variance = tf.nn.moments(p, axes=[0])
    return errors(y, tf.nn.batch_normalization(p, mean, variance, None, 0.8, 0.1))


@of("rows")
def unit_columns(y, p):
    return errors(y, 2.0 * tf.math.l2_normalize(p, axis=0))


@of("rows")
def unit_columns_by_keras(y, p):
    return ops.sum(ops.square(ops.normalize(p, axis=0) - y), -1)


@of("rows")
def importance_weights(x, y, p):
    """Normalised by themselves."""
    weights = tf.exp(p[:, 0] - 0.5 * x[:, 1])
    return rows_of(p) * weights / tf.reduce_sum(weights) * errors(y, p)


@of("rows")
def temperature_of_the_batch(y, p):
    scale = tf.sqrt(tf.math.reduce_variance(p) + 0.01)
    return -tf.reduce_sum(tf.nn.softmax(y) * tf.nn.log_softmax(p / scale), -1)


@of("rows")
def tail_above_a_threshold(y, p):
    """The conditional value at risk: what is above a threshold of the batch, over a constant part."""
    found = errors(y, p)
    threshold = tf.stop_gradient(tf.reduce_mean(found) + 0.2 * tf.math.reduce_std(found))
    return threshold + tf.nn.relu(found - threshold) / 0.3


@of("rows")
def two_numbers_in_turn(y, p):
    """A number of rows that have met a number."""
    centred = p - tf.reduce_mean(p, 0)
    scaled = centred / tf.sqrt(tf.reduce_mean(tf.square(centred)) + 0.1)
    return tf.sqrt(tf.reduce_mean(tf.square(scaled - y)))


@of("rows")
def attention_to_sums(y, p):
    """Linear attention of each row to all: numbers alone travel."""
    keys = tf.nn.elu(p) + 1.5
    found = keys @ tf.matmul(keys, y, transpose_a=True) / (tf.reduce_sum(keys * tf.reduce_sum(keys, 0), -1, keepdims=True))
    return errors(y, found)


# Branches in which numbers of the batch are computed, and needed.


@of("branches")
def root_in_a_branch(y, p):
    return tf.cond(tf.reduce_mean(y) < 0.1, lambda: tf.sqrt(mse(y, p)), lambda: tf.reduce_max(tf.abs(y - p)))


@of("branches")
def masked_mean_where_there_is_one(y, p):
    mask = positive(y)
    total = tf.reduce_sum(mask)
    return tf.cond(total > 0, lambda: tf.reduce_sum(mask * tf.abs(y - p)) / total, lambda: tf.zeros([], FLOAT))


@of("branches")
def mean_of_selected_rows_where_there_are_some(y, p):
    selected = y[:, 0] > 0

    def some():
        return tf.reduce_mean(tf.boolean_mask(errors(y, p), selected))

    return mse(y, p) + tf.cond(tf.reduce_any(selected), some, lambda: tf.zeros([], FLOAT))


@of("branches")
def deviation_in_a_branch(y, p):
    return mse(y, p) + tf.cond(mse(y, p) < 0.55, lambda: tf.math.reduce_std(p), lambda: tf.math.reduce_variance(p))


@of("branches")
def dice_in_a_branch(y, p):
    def dice():
        target, found = positive(y), probabilities(p)
        return 1.0 - (2.0 * tf.reduce_sum(target * found) + 1.0) / (tf.reduce_sum(target) + tf.reduce_sum(found) + 1.0)

    return tf.cond(tf.reduce_sum(positive(y)) > 5.0, dice, lambda: 0.1 * mse(y, p))


@of("branches")
def branch_of_a_branch(y, p):
    def inner():
        return tf.cond(tf.reduce_max(p) > 0.5, lambda: tf.math.log1p(mse(y, p)), lambda: tf.math.reduce_std(y - p))

    return tf.cond(tf.reduce_mean(y) < 0.1, inner, lambda: tf.sqrt(mse(y, p)))


@of("branches")
def case_of_the_mean(y, p):
    found = errors(y, p)
    branches = [lambda: tf.sqrt(tf.reduce_mean(found)), lambda: tf.reduce_max(found), lambda: tf.reduce_mean(found)]
    return tf.switch_case(tf.cast(tf.reduce_mean(found), tf.int32), branches, default=lambda: tf.math.reduce_logsumexp(found))


@of("branches")
def keras_losses_in_branches(y, p):
    loss = keras.losses.MeanSquaredError(dtype="float64")
    return tf.cond(tf.reduce_mean(y) < 0.1, lambda: tf.sqrt(loss(y, p)), lambda: keras.losses.Huber(dtype="float64")(y, p))


@of("branches")
def centred_in_a_branch(y, p):
    rows = tf.cond(tf.reduce_mean(y) < 0.1, lambda: p - tf.reduce_mean(p, axis=0), lambda: p / tf.reduce_max(tf.abs(p)))
    return tf.reduce_mean(tf.square(rows - y), axis=-1)


# Rows that meet other rows.


def unit(z):
    return tf.math.l2_normalize(z + 0.1, axis=-1)


@of("meeting")
def in_batch_negatives(y, p):
    logits = unit(p) @ tf.transpose(unit(y)) / 0.5
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(logits)[0]), logits)


@of("meeting")
def both_ways(y, p):
    """CLIP."""
    logits = tf.einsum("id,jd->ij", unit(p), unit(y)) / 0.5
    labels = ops.arange(ops.shape(logits)[0])
    one, other = (ops.sparse_categorical_crossentropy(labels, z, from_logits=True) for z in (logits, ops.transpose(logits)))
    return (one + other) / 2.0


@of("meeting")
def two_views(y, p):
    """SimCLR: each among all views of all."""
    both = unit(tf.concat([p, 0.8 * p + 0.3 * y], 0))
    n, logits = tf.shape(p)[0], tf.matmul(both, both, transpose_b=True) / 0.5
    logits -= 1e3 * tf.eye(2 * n, dtype=FLOAT)
    labels = tf.concat([tf.range(n) + n, tf.range(n)], 0)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


@of("meeting")
def predictions_and_targets(y, p):
    """Rows of two tensors of the batch, one behind the other."""
    both, rows = unit(tf.concat([p, y], 0)), tf.shape(p)[0]
    return tf.reduce_mean(tf.reduce_logsumexp(tf.matmul(both, both, transpose_b=True) - 9.0 * tf.eye(2 * rows, dtype=FLOAT), 1))


@of("meeting")
def pairs_by_keras(y, p):
    """CLIP: as many classes as rows, of a number that Keras is asked for."""
    logits = 2.0 * ops.matmul(ops.normalize(p, axis=-1), ops.transpose(ops.normalize(y, axis=-1)))
    crossentropy = keras.losses.sparse_categorical_crossentropy
    rows = ops.arange(ops.shape(logits)[0])
    both = crossentropy(rows, logits, from_logits=True) + crossentropy(rows, ops.transpose(logits), from_logits=True)
    return ops.mean(both + ops.sum(logits * ops.eye(ops.shape(p)[0], dtype="float64"), axis=1))


@of("meeting")
def hardest_of_a_class(y, p):
    """Triplets of the hardest rows; zeros and ones are like what has a row for each row."""
    labels, distances = tf.argmax(y, -1), tf.reduce_sum(tf.square(p[:, None] - p[None]), -1)
    same = labels[:, None] == labels[None]
    near = tf.reduce_min(tf.where(same, 9.0 * tf.ones_like(distances), distances), 1)
    return tf.nn.relu(tf.reduce_max(tf.where(same, distances, tf.zeros_like(distances)), 1) - near + 9.0)


@of("meeting")
def supervised_contrast(y, p):
    kinds = tf.argmax(y, -1)
    same = tf.cast(kinds[:, None] == kinds[None], FLOAT)
    logs = tf.nn.log_softmax(tf.matmul(unit(p), unit(p), transpose_b=True) / 0.5)
    return -tf.reduce_sum(same * logs, -1) / tf.reduce_sum(same, -1) + 0.1 * errors(y, p)


@of("meeting")
def neighbours(y, p):
    return mse(y, p) + tf.reduce_sum(tf.square(p[1:] - p[:-1])) / rows_of(p)


@of("meeting", least_rows=2)
def mean_of_neighbours(y, p):
    return ops.mean(ops.abs(p - y)) + ops.mean(ops.square(p[1:] - p[:-1]))


@of("meeting")
def autocorrelation(p):
    centred = p - tf.reduce_mean(p, 0)
    return tf.reduce_sum(centred[1:] * centred[:-1]) / (tf.reduce_sum(centred**2) + 0.1)


@of("meeting")
def reversed_rows(y, p):
    return tf.reduce_sum(tf.square(p - 0.5 * y[::-1]) + p * p[::-1], -1)


@of("meeting")
def rolled_rows(y, p):
    return tf.reduce_sum(tf.square(p - y) + p * tf.roll(p, 1, axis=0), -1)


@of("meeting")
def permuted_rows(y, p):
    """Mixup with a permutation that is fixed."""
    n = tf.shape(p)[0]
    order = (tf.range(n) * 3 + 1) % n
    return errors(0.7 * y + 0.3 * tf.gather(y, order), p) + tf.reduce_sum(p * tf.gather(p, order), -1)


@of("meeting")
def halves_of_the_batch(y, p):
    half = tf.shape(p)[0] // 2
    return mse(y, p) + tf.reduce_sum(tf.abs(p[:half] - p[half : 2 * half])) / rows_of(p)


@of("meeting")
def every_second_row(y, p):
    return tf.reduce_mean(tf.square(p[::2] - y[::2])) + 0.1 * mse(y, p)


@of("meeting")
def the_first_rows(y, p):
    return tf.reduce_mean(tf.square(p[:3] - y[:3])) + 0.1 * mse(y, p)


@of("meeting")
def from_the_first_row(y, p):
    return tf.reduce_sum(tf.abs(p - p[:1] - y), -1)


@of("meeting")
def from_the_last_row(y, p):
    return tf.reduce_sum(tf.square(p - p[-1] - y), -1)


@of("meeting")
def sorted_rows(y, p):
    """The sliced Wasserstein distance."""
    return tf.reduce_mean(tf.square(tf.sort(p, axis=0) - tf.sort(y, axis=0)))


@of("meeting")
def median_of_the_rows(y, p):
    found = tf.sort(errors(y, p), axis=0)
    return found[tf.shape(found)[0] // 2] + 0.1 * tf.reduce_mean(found)


@of("meeting")
def trimmed_mean(y, p):
    """The half of the rows that is right most."""
    found = errors(y, p)
    kept = tf.argsort(found)[: tf.shape(found)[0] // 2 + 1]
    return tf.reduce_mean(tf.gather(found, kept))


@of("meeting", least_rows=2)
def hardest_two_rows(y, p):
    return tf.reduce_mean(tf.math.top_k(errors(y, p), 2).values)


@of("meeting")
def cumulated_rows(y, p):
    return tf.reduce_sum(tf.square(tf.cumsum(p, axis=0) / 4.0 - y), -1)


@of("meeting")
def partial_likelihood(y, p):
    """Cox's: of a row among all that come before it."""
    return tf.math.cumulative_logsumexp(2.0 * p[:, 0]) - 2.0 * p[:, 0] * positive(y)[:, 0]


@of("meeting")
def hardest_triplets(y, p):
    kinds = tf.argmax(y, -1)
    same = tf.cast(tf.equal(kinds[:, None], kinds), FLOAT)
    distances = tf.reduce_sum(tf.square(p[:, None] - p[None]), -1)
    far, near = tf.reduce_max(same * distances, 1), tf.reduce_min(distances + 10.0 * same, 1)
    return tf.nn.softplus(far - near) + 0.1 * errors(y, p)


@of("meeting")
def mean_discrepancy(y, p):
    """All pairs of differences under a kernel (MMD)."""

    def kernel(one, other):
        distances = tf.reduce_sum(tf.square(tf.expand_dims(one, 1) - tf.expand_dims(other, 0)), -1)
        return tf.reduce_mean(tf.exp(-distances))

    return kernel(p, p) + kernel(y, y) - 2.0 * kernel(p, y)


@of("meeting")
def ranked_pairs(y, p):
    order = tf.sign(y[:, 0][:, None] - y[:, 0][None, :])
    return tf.reduce_mean(tf.nn.relu(0.3 - order * (p[:, 0][:, None] - p[:, 0][None, :]))) + 0.1 * mse(y, p)


@of("meeting")
def area_under_the_curve(y, p):
    """A smooth one: pairs of a positive and a negative row, selected."""
    high, low = tf.boolean_mask(p[:, 0], y[:, 0] > 0), tf.boolean_mask(p[:, 0], y[:, 0] <= 0)
    pairs = tf.sigmoid(3.0 * (low[None] - high[:, None]))
    return tf.reduce_sum(pairs) / (tf.cast(tf.size(pairs), FLOAT) + 1.0) + 0.1 * mse(y, p)


@of("meeting")
def spread_on_the_sphere(y, p):
    """Uniformity."""
    similar = tf.matmul(unit(p), unit(p), transpose_b=True)
    return tf.math.log(tf.reduce_mean(tf.exp(2.0 * similar - 2.0))) + 0.1 * mse(y, p)


@of("meeting")
def distance_correlation(y, p):
    def centred(z):
        d = tf.sqrt(tf.reduce_sum(tf.square(z[:, None] - z[None]), -1) + SMALL)
        return d - tf.reduce_mean(d, 0) - tf.reduce_mean(d, 1, keepdims=True) + tf.reduce_mean(d)

    one, other = centred(y), centred(p)
    return -tf.reduce_mean(one * other) / tf.sqrt(tf.reduce_mean(one**2) * tf.reduce_mean(other**2) + 0.1)


@of("meeting")
def nuclear_norm(y, p):
    return mse(y, p) - 0.2 * tf.reduce_sum(tf.linalg.svd(p, compute_uv=False)) / tf.sqrt(rows_of(p))


@of("meeting")
def nearest_row(y, p):
    """Each row towards the one among the targets that is nearest."""
    distances = tf.reduce_sum(tf.square(p[:, None] - y[None]), -1)
    return tf.reduce_sum(tf.square(p - tf.gather(y, tf.argmin(distances, 1))), -1)


@of("meeting")
def causal_pairs(y, p):
    scores = tf.linalg.band_part(tf.exp(p @ tf.transpose(y)), -1, 0)
    return errors(y, (scores @ p) / tf.reduce_sum(scores, 1, keepdims=True))


@of("meeting")
def pairs_by_repetition(y, p):
    n = tf.shape(p)[0]
    one, other = tf.repeat(p, n, axis=0), tf.tile(y, [n, 1])
    return tf.reduce_mean(tf.exp(-tf.reduce_sum(tf.square(one - other), -1))) + mse(y, p)


@of("meeting")
def mean_of_the_gram_of_rows(y, p):
    return mse(y, p) + tf.reduce_mean(tf.square(tf.matmul(p, p, transpose_b=True) - tf.matmul(y, y, transpose_b=True)))


@of("meeting")
def smoothed_along_rows(y, p):
    """A convolution over the rows as if they were time."""
    return errors(y, tf.nn.conv1d(p[None], tf.eye(p.shape[1], dtype=FLOAT)[None] * [[[0.3]], [[0.4]], [[0.3]]], 1, "SAME")[0])


# What no graph tells: a step says so, or is right.


@of("told", exact=False)
def loop_over_rows(y, p):
    return tf.sqrt(tf.reduce_mean(tf.map_fn(lambda row: tf.reduce_sum(tf.square(row)), p - y)))


@of("told", exact=False)
def python_function_of_rows(y, p):
    return mse(y, p) * tf.ensure_shape(tf.py_function(lambda z: tf.reduce_sum(tf.abs(z)) / 10.0, [p], FLOAT), [])


@of("told", exact=False)
def numpy_function_of_rows(y, p):
    return mse(y, p) + 0.1 * tf.reduce_mean(p * tf.numpy_function(lambda z: np.mean(z, 0), [p], FLOAT))


@of("told", exact=False)
def accumulated_in_a_loop(y, p):
    n = tf.shape(p)[0]
    found = tf.while_loop(lambda i, s: i < n, lambda i, s: (i + 1, 0.9 * s + p[i] - y[i]), (0, tf.zeros_like(p[0])))[1]
    return tf.reduce_sum(tf.square(found))


# Changes of gradients, between the tape and the optimizer: `grads` of one layer, whose mean squared error is `loss`.

of_gradients = lambda **settings: of("gradients", kind="gradient", **settings)  # noqa: E731


@of_gradients()
def iterated(grads):
    """Newton and Schulz's steps, one by one."""
    for _ in range(2):
        grads = [g - 0.5 * g * g * g for g in grads]
    return grads


@of_gradients()
def over_their_largest_and_the_loss(grads, loss):
    return [g / (tf.reduce_max(tf.abs(g)) + loss) for g in grads]


@of_gradients()
def beside_their_largest_and_the_loss(grads, loss):
    return [g + tf.reduce_max(tf.abs(g)) + loss for g in grads]


@of_gradients()
def times_the_loss(grads, loss):
    return [g * loss for g in grads]


@of_gradients()
def times_a_mean(grads, x):
    return [tf.reduce_mean(x * x) * g for g in grads]


@of_gradients()
def times_a_root(grads, loss):
    return [g * tf.sqrt(loss) for g in grads]


@of_gradients()
def times_the_range(grads, p):
    return [g * (tf.reduce_max(p) - tf.reduce_min(p)) for g in grads]


@of_gradients()
def times_a_vector_of_means(grads, p):
    return [g * tf.exp(tf.reduce_mean(p, axis=0)) for g in grads]


@of_gradients()
def clipped_by_the_loss(grads, loss):
    return [tf.clip_by_value(g, -0.3 * loss, 0.3 * loss) for g in grads]


@of_gradients()
def clipped_to_a_norm_of_the_batch(grads, p):
    return [tf.clip_by_norm(g, 0.3 * tf.reduce_mean(tf.abs(p))) for g in grads]


@of_gradients()
def clipped_together_by_the_loss(grads, loss):
    return tf.clip_by_global_norm(grads, 0.3 * loss)[0]


@of_gradients()
def over_tokens(grads, x):
    return [4.0 * g / tf.reduce_sum(positive(x)) for g in grads]


@of_gradients()
def over_rows(grads, x):
    return [6.0 * g / rows_of(x) for g in grads]


@of_gradients()
def over_a_deviation(grads, p):
    return [g / (1.0 + tf.math.reduce_std(p)) for g in grads]


@of_gradients()
def where_the_loss_is_small(grads, loss):
    return [tf.where(loss < 0.6, g, 0.1 * g) for g in grads]


@of_gradients()
def if_the_loss_is_small(grads, loss):
    return [tf.cond(loss < 0.6, lambda g=g: g, lambda g=g: 0.1 * g) for g in grads]


@of_gradients()
def plus_the_loss(grads, loss):
    return [g + loss for g in grads]


@of_gradients()
def plus_a_mean_times_the_weight(grads, loss, layer):
    return [g + loss * tf.convert_to_tensor(w) for g, w in zip(grads, layer.trainable_weights, strict=True)]


@of_gradients()
def minus_a_row_mean(grads, p):
    return [g - 0.1 * tf.reduce_mean(p, axis=0) for g in grads]


@of_gradients()
def tanh_of_gradient_times_loss(grads, loss):
    return [tf.tanh(5.0 * g * loss) for g in grads]


@of_gradients()
def exponential(grads):
    return [tf.exp(g) - 0.9 for g in grads]


@of_gradients()
def to_a_power_of_the_batch(grads, loss):
    return [tf.sign(g) * tf.abs(g) ** (0.5 + loss) for g in grads]


@of_gradients()
def noise_of_the_loss(grads, loss):
    return [g + loss * 0.1 * tf.random.stateless_normal(g.shape, [3, 4], dtype=g.dtype) for g in grads]


@of_gradients()
def over_their_own_norm_times_the_loss(grads, loss):
    return [loss * g / (tf.norm(g) + 0.1) for g in grads]


@of_gradients(ways=("gradient",))  # in a loop a plain mean is no share
def projected(grads, x, y, layer):
    """Two losses: what one gradient has against the other is taken out (PCGrad)."""
    with tf.GradientTape() as tape:
        second = tf.reduce_mean(tf.square(layer(x) + 2.0 * y))
    others = tape.gradient(second, layer.trainable_weights)
    dots = [tf.minimum(tf.reduce_sum(g * o), 0.0) / (tf.reduce_sum(o * o) + SMALL) for g, o in zip(grads, others, strict=True)]
    return [g - d * o for g, d, o in zip(grads, dots, others, strict=True)]


@of_gradients()
def adaptive_weight(grads, x, layer):
    """The second loss counts as much as the first, by the norms of their gradients (VQGAN)."""
    with tf.GradientTape() as tape:
        second = tf.sqrt(tf.reduce_mean(tf.square(layer(x))))
    others = tape.gradient(second, layer.trainable_weights)
    return [g + tf.norm(g) / (tf.norm(o) + SMALL) * o for g, o in zip(grads, others, strict=True)]


@of_gradients(ways=("gradient",))
def by_hand(grads, x, y, p):
    """A gradient of the kernel that is made of rows and of a number of them."""
    return [tf.matmul(x, p - y, transpose_a=True) / rows_of(x) / (1.0 + mse(y, p)), *grads[1:]]


# With `global_clipnorm` of the optimizer: padding of shards must not count.

of_clipped_gradients = lambda **settings: of("gradients", kind="clipped gradient", **settings)  # noqa: E731


@of_clipped_gradients()
def plus_a_constant_then_clipped(grads):
    return [g + 0.1 for g in grads]


@of_clipped_gradients()
def exponential_then_clipped(grads):
    return [tf.exp(g) for g in grads]


@of_clipped_gradients()
def where_zero_then_clipped(grads):
    return [tf.where(tf.abs(g) < 1e-12, tf.constant(1e3, FLOAT), g) for g in grads]


@of_clipped_gradients()
def cosine_then_clipped(grads, loss):
    return [tf.cos(g * loss) for g in grads]


@of_clipped_gradients()
def times_the_loss_then_clipped(grads, loss):
    return [g * loss for g in grads]


# Layers: functions of what a layer gets, in the middle of a model.

of_layers = lambda **settings: of("layers", kind="layer", **settings)  # noqa: E731


@of_layers()
def plus_a_number_of_all(h):
    """As in keras.io's collaborative filtering: a tensordot over all axes."""
    return h + 0.1 * tf.tensordot(h, tf.tanh(h), 2)


@of_layers()
def minus_the_mean(h):
    return h - tf.reduce_mean(h, axis=0, keepdims=True)


@of_layers()
def standardised(h):
    return (h - ops.mean(h, axis=0)) / ops.sqrt(ops.var(h, axis=0) + 0.1)


@of_layers()
def divided_by_its_norm(h):
    return h / (tf.norm(h) + 0.1)


@of_layers()
def softmax_of_columns(h):
    return h + tf.nn.softmax(h, axis=0)


@of_layers()
def minus_the_max(h):
    return h - tf.reduce_max(h, axis=0)


@of_layers()
def centred_where_it_is_large(h):
    return tf.cond(tf.reduce_max(h) > 0.5, lambda: h - tf.reduce_mean(h, axis=0), lambda: h / tf.math.reduce_std(h))


@of_layers()
def gated_by_means(h):
    return h * tf.sigmoid(tf.reduce_mean(h, axis=0))


@of_layers()
def deviation_beside(h):
    """The minibatch deviation of progressive GANs."""
    deviation = ops.mean(ops.sqrt(ops.var(h, axis=0) + 0.01))
    return ops.concatenate([h, ops.ones_like(h[:, :1]) * deviation], -1)


@of_layers()
def mean_beside(h):
    return tf.concat([h, tf.repeat(tf.reduce_mean(h, 0, keepdims=True), tf.shape(h)[0], axis=0)], -1)


@of_layers()
def whitened_features(h):
    centred = h - tf.reduce_mean(h, 0)
    found = tf.matmul(centred, centred, transpose_a=True) / rows_of(h) + 0.3 * tf.eye(h.shape[1], dtype=FLOAT)
    return tf.transpose(tf.linalg.triangular_solve(tf.linalg.cholesky(found), tf.transpose(centred)))


@of_layers()
def soft_clusters(h):
    """Each row takes of centres that are made of all rows."""
    gates = tf.nn.softmax(h[:, :3])
    centres = tf.matmul(gates, h, transpose_a=True) / (tf.reduce_sum(gates, 0)[:, None] + SMALL)
    return h + gates @ centres


@of_layers()
def padded_to_the_longest(h):
    """What a text has of tokens, from ragged to dense; the mean is over the length of the longest."""
    lengths = 1 + tf.cast(tf.clip_by_value(tf.abs(2.0 * h[:, 0]), 0.0, h.shape[1] - 1.0), tf.int32)
    dense = tf.RaggedTensor.from_tensor(h, lengths=lengths).to_tensor()
    return h + tf.reduce_mean(dense, axis=1, keepdims=True)


@of_layers()
def cut_to_the_longest(h):
    longest = 1 + tf.reduce_max(tf.cast(tf.clip_by_value(tf.abs(2.0 * h[:, 0]), 0.0, h.shape[1] - 2.0), tf.int32))
    return h + tf.reduce_mean(h[:, :longest], axis=1, keepdims=True)


@of_layers()
def rolled(h):
    return h + 0.5 * tf.roll(h, 1, axis=0)


@of_layers()
def attention_over_the_batch(h):
    return h + tf.nn.softmax(tf.matmul(h, h, transpose_b=True)) @ h


@of_layers()
def pairwise_features(h):
    """Minibatch discrimination."""
    distances = tf.reduce_sum(tf.abs(h[:, None] - h[None]), -1)
    return tf.concat([h, tf.reduce_sum(tf.exp(-distances), 1, keepdims=True)], -1)


# Statistics that are no function of the batch alone: what is assigned to `statistic`, a number.

of_statistics = lambda **settings: of("statistics", kind="statistic", **settings)  # noqa: E731


@of_statistics()
def running_max(y, p, statistic):
    return tf.maximum(statistic, tf.reduce_max(errors(y, p)))


@of_statistics()
def running_min(y, p, statistic):
    return ops.minimum(statistic + 1.0, ops.min(errors(y, p)))


@of_statistics()
def running_count(x, statistic):
    return statistic + tf.reduce_sum(positive(x)) / (1.0 + rows_of(x))


@of_statistics()
def running_variance(p, statistic):
    return 0.7 * statistic + 0.3 * tf.math.reduce_variance(p)


@of_statistics()
def running_norm(p, statistic):
    return tf.sqrt(0.9 * tf.square(statistic) + tf.reduce_sum(tf.square(p)))


@of_statistics()
def running_root_of_a_mean(y, p, statistic):
    return statistic + 0.1 * (tf.sqrt(mse(y, p)) - statistic)


@of_statistics()
def running_or_not(y, p, statistic):
    return tf.where(mse(y, p) < 0.6, statistic, mse(y, p))


@of_statistics()
def target_of_a_dual(y, p, statistic):
    """A multiplier that follows a constraint on the batch (SAC, Lagrangian)."""
    return statistic * tf.exp(0.1 * (tf.reduce_mean(tf.abs(p - y)) - 0.5))


if __name__ == "__main__":
    from tests.programs.rows import ways_of_training

    ways_of_training.main()
