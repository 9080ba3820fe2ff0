"""How the rows of a global batch are dealt to the devices.

    10 rows, four devices                               0 1 2  |  3 4 5  |  6 7  |  8 9

Tensors of one batch may differ in their rows, as when two datasets are zipped: 500 unlabelled examples and 25 labelled ones.
Every device must get the same share of each, or what it computes of them could not be weighted by one number. So their greatest
common divisor is dealt: 25 units, of 20 and of 1 rows.

    500 and 25 rows, two devices                        13 units: 260 and 13 rows  |  12 units: 240 and 12 rows
    64 and 448 rows, four devices                       16 units: 16 and 112 rows each
    7 and 500 rows, two devices                         1 unit: 7 and 500 rows     |  none: exact, and one device has all the work
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import errors
from tfdist.data.signature import transformations


def may_differ(dataset: Any) -> bool:
    """Whether the tensors of a batch of `dataset` may have different numbers of rows by purpose.

    That is where batches of two datasets are zipped, or a generator makes them. It is asked beforehand, because what finds their
    greatest common divisor costs an iterator a quarter of the time that it takes.
    """
    waiting = [dataset]
    while waiting:
        node = waiting.pop()
        if _batches(node):
            continue
        inputs = list(node._inputs())
        zipped = [one for x in inputs for one in transformations(x)] if type(node).__name__.endswith("ZipDataset") else []
        if _is_generator(node) or any(_batches(one) or _is_generator(one) for one in zipped):
            return True
        waiting += inputs
    return False


def _batches(node: Any) -> bool:
    return "Batch" in type(node).__name__


def _is_generator(node: Any) -> bool:
    """Whether `node` is what `Dataset.from_generator` makes."""
    inputs = list(node._inputs())
    return type(node).__name__.endswith("FlatMapDataset") and type(inputs[0]).__name__.endswith("TensorDataset")


class Dealing:
    """The rows that each of `num_parts` devices gets of the tensors of a batch.

    Args:
        num_parts: how many devices there are.
        sizes: how many rows each tensor has, None where that is known at run time only. Where some are known, and agree, the
            others must have as many.
        may_differ: whether they may have different numbers of rows where none is known.

    Attributes:
        piece_rows: how many rows of each tensor every device gets, None where devices get different numbers or it is not known.
    """

    def __init__(self, num_parts: int, sizes: Sequence[int | None], may_differ: bool):
        self._num_parts = num_parts
        known = {size for size in sizes if size is not None}
        self._are_known = None not in sizes
        self._agree = len(known) == 1 or not known and not may_differ
        units = math.gcd(*known) if len(known) == 1 or self._are_known else None
        is_even = units is not None and units % num_parts == 0
        self.piece_rows = [(units if size is None else size) // num_parts if is_even else None for size in sizes]
        self._has_warned = False
        if self._are_known:
            self._warn_if_idle(units or 0, [size or 0 for size in sizes])

    def _warn_if_idle(self, units: int, rows: Sequence[int]) -> None:
        if units >= self._num_parts or max(rows, default=0) < self._num_parts or self._has_warned or len(set(rows)) == 1:
            return
        self._has_warned = True
        errors.warn(
            f"The parts of a batch have {', '.join(map(str, rows))} rows, of which every device must get the same share: {units} "
            f"of {self._num_parts} devices get any. Choose batch sizes whose greatest common divisor is a multiple of "
            f"{self._num_parts}, with `drop_remainder=True`."
        )

    # What follows runs in the graph that splits a batch.

    def bounds(self, tensors: Sequence[Any]) -> list[list[tf.Tensor]]:
        """Returns where each piece of each tensor begins, and the last one ends: tensors of shape (1,), as a slice takes them."""
        rows = [_rows(tensor) for tensor in tensors]
        # Opaque to shape inference: else an uneven piece gets a static size, and the workers' shapes differ.
        units = tf.compat.v1.placeholder_with_default(self._units(tensors, rows), [])
        part, number = tf.constant([*range(self._num_parts + 1)], tf.int64), tf.constant(self._num_parts, tf.int64)
        dealt = part * (units // number) + tf.minimum(part, units % number)
        if self._agree or len(rows) == 1:
            return [tf.split(dealt, self._num_parts + 1)] * len(rows)
        each = tf.maximum(units, 1)
        return [tf.split(dealt * (own // each), self._num_parts + 1) for own in rows]

    def _units(self, tensors: Sequence[Any], rows: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the greatest common divisor of `rows`, those of `tensors`."""
        first, *others = rows
        if not others or self._agree and self._are_known:
            return first
        if self._agree:
            # The raw op: TensorFlow's function would put each in a branch of its own, which takes longest to trace of all here.
            checks = [
                tf.raw_ops.Assert(
                    condition=tf.equal(other, first),
                    data=[
                        f"All tensors of a batch must have the same number of rows. Tensor {index} ({tensors[index]}) has "
                        f"another number than tensor 0 ({tensors[0]}). If each example has its own, as a graph of nodes, give "
                        "the model ragged tensors, and merge the examples there (`x.values`, `x.value_rowids()`). Else batch all "
                        "with `drop_remainder=True`, or zip datasets that are batched:",
                        other,
                        first,
                    ],
                )
                for index, other in enumerate(others, start=1)
            ]
            with tf.control_dependencies(checks):
                return tf.identity(first)
        units = tf.numpy_function(self._common_divisor, [tf.stack(rows)], tf.int64, stateful=False)
        return tf.ensure_shape(units, [])

    def _common_divisor(self, rows: np.ndarray) -> np.int64:
        units = np.gcd.reduce(rows)
        self._warn_if_idle(int(units), rows.tolist())
        return units


def _rows(tensor: Any) -> tf.Tensor:
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.nrows(out_type=tf.int64)
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    if tensor.shape.rank is not None and tensor.shape[0] is not None:
        return tf.constant(tensor.shape[0], tf.int64)
    check = tf.debugging.assert_rank_at_least(tensor, 1, message="The dataset must yield global batches, not scalars.")
    with tf.control_dependencies([check]):
        return tf.shape(tensor, out_type=tf.int64)[0]
