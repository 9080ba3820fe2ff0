"""Data that are known only when they come, as what Python code yields: whether all workers read the same batches.

    batch           0  1  2  3  4  5  6  7  8  ...
    compared        x  x  x     x           x          of each iteration, before a worker takes its part of the batch

Each worker tells the others a digest of these batches, and waits for nobody.

Note: digests.
The last bits of floats may differ between machines, and a batch may be large. So a digest has of each tensor the number of its
values, and of a sample of them, spread evenly, the sum with signs (drawn once, the same everywhere) and the norm. Rounding
changes such a sum by a millionth of the norm; the sums of two different samples lie about a norm apart.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import errors
from tfdist.data.parts import times_as_long

Digest = list[list[float]]  # of each tensor: how many values it has, their sum with signs, their norm

_SAMPLE = 1024
_SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], _SAMPLE)
_TOLERANCE = 1e-3  # of the norm


def compared(dataset: tf.data.Dataset, tell: Callable[[int, int, Digest], None]) -> tf.data.Dataset:
    """Returns `dataset`, which calls `tell(iteration, batch, digest)` while it is read, from any thread; both count from 0."""
    iterations = itertools.count()
    none, zero = tf.constant(-1, tf.int64), tf.constant(0, tf.int64)

    def note(noted: np.int64, batch: np.int64, sizes: np.ndarray, *samples: np.ndarray) -> np.int64:
        iteration = next(iterations) if noted < 0 else int(noted)
        tell(iteration, int(batch), [[int(size), *_digest(sample)] for size, sample in zip(sizes, samples, strict=True)])
        return np.int64(iteration)

    def look(state: tuple[tf.Tensor, tf.Tensor], element: Any) -> Any:
        iteration, batch = state

        def looked() -> tf.Tensor:
            sizes, samples = zip(*map(_sample, _tensors(element)), strict=True)
            return tf.ensure_shape(tf.numpy_function(note, [iteration, batch, tf.stack(sizes), *samples], tf.int64), [])

        is_power_of_two = tf.equal(tf.bitwise.bitwise_and(batch, batch - 1), 0)
        return (tf.cond(is_power_of_two, looked, lambda: iteration), batch + 1), element

    if not _tensors(dataset.element_spec):
        return dataset
    return times_as_long(dataset.scan((none, zero), look), dataset)


def digest_of(tensors: Iterable[tf.Tensor]) -> Digest:
    """Returns the digest of tensors that are there now."""
    with tf.device("CPU"):  # a GPU would do all that it has queued before it tells
        return [[int(size), *_digest(sample.numpy())] for size, sample in map(_sample, tensors)]


def is_same(one: Digest, other: Digest) -> bool:
    """Whether two digests may be of the same batch."""
    return len(one) == len(other) and all(
        size == other_size and abs(total - other_total) <= _TOLERANCE * max(norm, other_norm)
        for (size, total, norm), (other_size, other_total, other_norm) in zip(one, other, strict=True)
    )


def difference(batch: int, here: Any, there: Any) -> str:
    """Returns what is said when a batch is another one on the worker `there` than on the worker `here`."""
    return errors.message(
        f"Workers read different data: batch {batch} of a dataset that runs Python code is another one on {there} than on "
        f"{here}.",
        fix="Every worker must be given the same batches, of which it keeps its rows: seed what the code draws "
        "(`numpy.random.default_rng(seed)`), the same on all workers. Or let each worker read a part of its own: "
        "`strategy.distribute_datasets_from_function`",
    )


def _digest(sample: np.ndarray) -> tuple[float, float]:
    sample = np.nan_to_num(sample, posinf=1.0, neginf=-1.0)
    return float(sample @ _SIGNS[: sample.size]), float(np.linalg.norm(sample))


def _tensors(structure: Any) -> list[Any]:
    """Returns the tensors, or their specs, of which a sample can be taken."""
    flat = [x for x in tf.nest.flatten(structure, expand_composites=True) if isinstance(x, tf.Tensor | tf.TensorSpec)]
    return [x for x in flat if x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_complex or x.dtype in (tf.bool, tf.string)]


def _sample(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns how many values a tensor has, and a sample of them, as float64."""
    values = tf.reshape(tensor, [-1])
    size = tf.size(values, out_type=tf.int64)
    number = tf.minimum(size, _SAMPLE)
    sample = tf.gather(values, tf.range(number) * size // tf.maximum(number, 1))
    if sample.dtype == tf.string:
        sample = tf.strings.to_hash_bucket_fast(sample, 1 << 20)
    return size, tf.cast(tf.math.real(sample) if sample.dtype.is_complex else sample, tf.float64)
