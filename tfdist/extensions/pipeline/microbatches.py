"""The microbatches of a rank's batch."""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.sharding.sharded_activations import mark_shard, shard_of

_BORNE = ("_keras_mask", "_keras_logits")  # what Keras has put on a model's output, rows, too


class Microbatches:
    """The microbatches of one rank's batch: slices, one after the other, that differ by a row at most.

        11 rows, 4 microbatches      rows 0 1 | 2 3 4 | 5 6 7 | 8 9 10

    A batch of fewer rows than microbatches leaves some of them without any. Layers cannot be relied on to compute on no rows (a
    convolution fails on CPUs, a mean is NaN), so the model is fed one row there, of which nothing is used: its outputs are cut to
    no rows before losses and metrics see them. Where a batch is known to be that small, and no other data rank has to compute
    the same, such microbatches are left out.

    The first axis of every tensor in `data`, (inputs, y, sample_weight), is the batch; None stays None.

    Args:
        data: the rank's batch.
        total: how many microbatches the schedule has.
        program: the rank's; None: one device computes all stages.

    Attributes:
        count: how many microbatches are computed, the first ones of `total`.
        known_rows: how many rows the batch has; None where that is known at run time only.
        rows: how many rows each of the `total` microbatches has, int32 scalars.
        fed: what the model is fed of each microbatch that is computed, flat.
        fed_rows: how many rows that is.
        may_be_empty: whether one that is computed may have no rows.
    """

    def __init__(self, data: Any, total: int, program: RankProgram | None):
        replicas = 1 if program is None else program.mesh.data_parallel_size
        on_host = contextlib.nullcontext if program is None else program.on_host
        leaves = [leaf for leaf in tf.nest.flatten(data) if tf.is_tensor(leaf)]
        self.known_rows = known = leaves[0].shape[0]
        is_short = known is not None and known < total
        self.count = count = max(1, known) if is_short and replicas == 1 else total
        self.may_be_empty = known is None or known < count
        found = tf.shape(leaves[0])[0] if known is None else known  # where the data are, or all of them would go to the host
        with on_host():
            all_rows = tf.cast(found, tf.int64)
            bounds = [tf.cast(all_rows * index // count, tf.int32) for index in range(count + 1)]
            self._spans = list(itertools.pairwise(bounds + [bounds[-1]] * (total - count)))
            self.rows = [stop - start for start, stop in self._spans]
        self._sizes: list[int | None] = [None] * total
        if known is not None:
            self._sizes = [known * (i + 1) // count - known * i // count for i in range(count)] + [0] * (total - count)
        self._own = [_slices(data, span, size) for span, size in zip(self._spans, self._sizes, strict=True)]
        self.fed = [inputs for inputs, *_ in self._own[:count]]
        self.fed_rows = self.rows
        if self.may_be_empty:
            with on_host():
                self.fed_rows = [tf.maximum(rows, 1) for rows in self.rows]
                last = tf.maximum(bounds[-1] - 1, 0)
                starts = [tf.minimum(start, last) for start, _ in self._spans[:count]]
                spans = [(start, tf.maximum(stop, start + 1)) for start, (_, stop) in zip(starts, self._spans, strict=False)]
            inputs = _with_a_row(data[0]) if replicas > 1 else data[0]
            self.fed = [_slices(inputs, span, self.fed_size(index)) for index, span in enumerate(spans)]

    def __getitem__(self, index: int) -> Any:
        return self._own[index]

    def fed_size(self, index: int) -> int | None:
        """Returns how many rows the model is fed with, where it is known."""
        size = self._sizes[index]
        return None if size is None else max(1, size)

    def own_rows(self, index: int, outputs: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns what the model has made of a microbatch's own rows, from what it has made of what it was fed."""
        if not self.may_be_empty:
            return outputs
        first = (tf.constant(0), self.rows[index])
        return [_made_of([x], lambda whole: _slices(whole, first, self._sizes[index])) for x in outputs]


def joined(parts: Mapping[int, Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Returns what the model has made of all rows, from what it has made of each microbatch's own, by number."""
    in_order = [parts[microbatch] for microbatch in sorted(parts)]
    return [_made_of(of_all, lambda *of_each: tf.concat(of_each, 0)) for of_all in zip(*in_order, strict=True)]


def _made_of(outputs: Sequence[tf.Tensor], make: Callable[..., tf.Tensor]) -> tf.Tensor:
    """Returns what `make` makes of outputs of the model; what they bear is made alike, and how they are held is noted."""
    made = mark_shard(make(*outputs), shard_of(outputs[0]))
    for name in _BORNE:
        borne = [getattr(x, name, None) for x in outputs]
        if all(x is not None for x in borne):
            setattr(made, name, make(*borne))
    return made


def _slices(structure: Any, span: tuple[tf.Tensor, tf.Tensor], size: int | None) -> Any:
    """Returns rows of every tensor of `structure`, `size` of them where that is known."""

    def of(x: Any) -> Any:
        if x is None:
            return x
        rows = x[span[0] : span[1]]
        if isinstance(rows, tf.Tensor):
            rows.set_shape([size, *x.shape[1:]])
        return rows

    return tf.nest.map_structure(of, structure)


def _with_a_row(inputs: Any) -> Any:
    """Returns inputs to which a row of zeros is added where they have none, as the batch of a data rank may have."""

    def of(x: Any) -> Any:
        if not isinstance(x, tf.Tensor):
            return x
        missing = 1 - tf.minimum(tf.shape(x)[0], 1)
        return tf.concat([x, tf.zeros(tf.concat([[missing], tf.shape(x)[1:]], 0), x.dtype)], 0)

    return tf.nest.map_structure(of, inputs)
