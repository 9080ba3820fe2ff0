"""The microbatches of a rank's batch."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from tfdist import errors


class Microbatches:
    """The microbatches of one rank's batch: equal slices, one after the other.

    For training the batch must be a multiple of `count`. Otherwise microbatches differ by a row at most, and a batch that is
    known to have fewer rows than `count` has as many microbatches as rows.

    The first axis of every tensor in `data` is the batch; None stays None. The error names `replicas`, the number of data ranks.

    Attributes:
        count: how many microbatches the batch has.
        known_rows: how many rows the batch has; None where that is known at run time only.
        rows: how many rows each microbatch has, int32 scalars.

    Raises:
        ValueError: a batch of known size is no multiple of `count`. A batch of unknown size that is none raises
            `tf.errors.InvalidArgumentError` when the step runs.
    """

    def __init__(self, data: Any, count: int, *, is_training: bool, replicas: int = 1):
        leaves = [leaf for leaf in tf.nest.flatten(data) if tf.is_tensor(leaf)]
        self.known_rows = known = leaves[0].shape[0]
        rows = tf.shape(leaves[0], out_type=tf.int64)[0] if known is None else tf.constant(known, tf.int64)
        if not is_training:
            count = count if known is None else max(1, min(count, known))
        elif known is not None and known % count:
            raise errors.value_error(
                f"A batch must be a multiple of `num_microbatches` x data ranks = {count} x {replicas} = {count * replicas} "
                f"rows, so that microbatches are equal. Each data rank got {known} rows.",
                num_microbatches=count,
                fix=f"Use a `batch_size` such as {max(known // count, 1) * count * replicas}, and drop a partial last batch.",
            )
        elif known is None:
            check = tf.debugging.Assert(
                tf.equal(rows % count, 0),
                [
                    f"A batch must be a multiple of num_microbatches x data ranks = {count * replicas} rows, so "
                    "that microbatches are equal. Drop a partial last batch, or use another batch_size. Rows of a data rank:",
                    rows,
                ],
            )
            with tf.control_dependencies([check]):
                rows = tf.identity(rows)
        self.count = count
        self._size = known // count if known is not None and known % count == 0 else None
        bounds = [tf.cast(rows * index // count, tf.int32) for index in range(count + 1)]
        slices = list(itertools.pairwise(bounds))
        self.rows = [stop - start for start, stop in slices]
        self._microbatches = [tf.nest.map_structure(lambda x: self._slice(x, *span), data) for span in slices]  # noqa: B023

    def __getitem__(self, index: int) -> Any:
        return self._microbatches[index]

    def model_inputs(self, index: int) -> list[tf.Tensor]:
        """Returns the model's inputs of a microbatch of (inputs, y, sample_weight), flat."""
        return list(self[index][0])

    def _slice(self, x: Any, start: tf.Tensor, stop: tf.Tensor) -> Any:
        if x is None:
            return x
        rows = x[start:stop]
        if isinstance(rows, tf.Tensor):
            rows.set_shape([self._size, *x.shape[1:]])
        return rows
