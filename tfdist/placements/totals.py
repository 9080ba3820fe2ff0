"""Numbers of which each data rank has a part, made those of all rows, the same on all ranks: a message for all of one kind."""

import functools
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from tfdist.collectives import Part, RankProgram, all_reduce, group_ops, ops
from tfdist.custom_gradients import with_adjoint
from tfdist.placements.constants import value_of
from tfdist.placements.kinds import How
from tfdist.placements.rank_rows import RankRows

_WIDE = {tf.float16: tf.float32, tf.bfloat16: tf.float32, tf.bool: tf.int32, tf.int8: tf.int32, tf.uint8: tf.int32}
_FEW = 64  # numbers that are sent as float64, whatever they are, to be in one message
MEANS = (How.MEAN, How.ALIKE)
EXTREMES = {How.MAX: 1, How.MIN: -1}

Tensors: TypeAlias = Sequence[tf.Tensor]


class Totals(Part):
    """Messages of one rank's numbers. A part of its state."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._replicas = len(program.group_ranks("data"))
        self._rows = program.part(RankRows)

    def of(self, tensors: Tensors, hows: Sequence[How], label: str) -> list[tf.Tensor]:
        """Returns what `tensors`, of one shape on all ranks, are of all rows: one message, one more for maxima and for minima."""
        found: dict[int, tf.Tensor] = {}
        for place, (x, how) in enumerate(zip(tensors, hows, strict=True)):
            if how in (How.SUM, How.COUNT) and self._is_alike(x):
                # No constant: a size that TensorFlow infers from it would not fit to what keeps the rank's own static shape.
                found[place] = tf.compat.v1.placeholder_with_default(tf.cast(value_of(x) * self._replicas, x.dtype), x.shape)
        sums = [place for place, how in enumerate(hows) if how not in (*EXTREMES, How.REPLICAS) and place not in found]
        if sums:
            totals = self._sums([tensors[place] for place in sums], [hows[place] in MEANS for place in sums], label)
            found.update(zip(sums, totals, strict=True))
        for how, sign in EXTREMES.items():
            extremes = [place for place, one in enumerate(hows) if one is how]
            if extremes:
                totals = self.reduced([sign * wide(tensors[place]) for place in extremes], "max", label)
                found.update((place, sign * total) for place, total in zip(extremes, totals, strict=True))
        found.update((place, tensors[place] / self._replicas) for place, how in enumerate(hows) if how is How.REPLICAS)
        rounded = [tf.round(found[place]) if x.dtype.is_integer else found[place] for place, x in enumerate(tensors)]
        return [tf.cast(y, x.dtype) for x, y in zip(tensors, rounded, strict=True)]

    def _is_alike(self, x: tf.Tensor) -> bool:
        """Whether `x` is a number of rows that is known when the step is traced, and that all ranks have alike."""
        ranks, program = self._program.group_ranks("data"), self._program
        is_known = program.are_sizes_equal and set(ranks).issubset(program.communicator.local_ranks)
        return is_known and tf.is_symbolic_tensor(x) and x.dtype.is_integer and value_of(x) is not None

    def reduced(self, tensors: Tensors, how: str, label: str) -> list[tf.Tensor]:
        """Reduces tensors over the data ranks, those of one dtype in one message; few numbers, all in one."""
        if any(x.dtype.is_complex for x in tensors):
            parts = [tf.stack([tf.math.real(x), tf.math.imag(x)]) if x.dtype.is_complex else x for x in tensors]
            totals = zip(tensors, self.reduced(parts, how, label), strict=True)
            return [tf.complex(*tf.unstack(total)) if x.dtype.is_complex else total for x, total in totals]
        found: dict[int, tf.Tensor] = {}
        sizes = [x.shape.num_elements() for x in tensors]
        for place in (place for place, size in enumerate(sizes) if size is None):
            found[place] = self._reduced_by_size(tensors[place], how, label)
        kinds = [wide(x).dtype for x in tensors]
        if None not in sizes and sum(sizes) <= _FEW and len(set(kinds)) > 1:
            kinds = [tf.float64] * len(tensors)
        for kind in dict.fromkeys(kinds):
            places = [place for place, one in enumerate(kinds) if one == kind and sizes[place] is not None]
            if not places:
                continue
            packed = tf.concat([tf.reshape(tf.cast(tensors[place], kind), [-1]) for place in places], 0)
            total = all_reduce(packed, "data", reduce_op=how, label=label)
            for place, part in zip(places, tf.split(total, [sizes[place] for place in places]), strict=True):
                whole = tf.round(part) if tensors[place].dtype.is_integer and kind.is_floating else part
                found[place] = tf.reshape(whole, tensors[place].shape)
        return [found[place] for place in range(len(tensors))]

    def _reduced_by_size(self, x: tf.Tensor, how: str, label: str) -> tf.Tensor:
        """Reduces a tensor of a size that is the same on all ranks, and known when the step runs; none are no message."""
        ranks, flat = self._program.group_ranks("data"), tf.reshape(wide(x), [-1])
        send = functools.partial(group_ops.all_reduce, self._program, ranks=ranks, reduce_op=how, label=label)

        def summed(numbers: tf.Tensor) -> tf.Tensor:  # its own adjoint, as a maximum is not
            return with_adjoint(send, summed, ops.watched(self._program, numbers, ranks))

        padded = tf.concat([flat, tf.zeros([1], flat.dtype)], 0)
        return tf.reshape((summed if how == "sum" else send)(padded)[:-1], tf.shape(x))

    def _sums(self, tensors: Tensors, are_means: Sequence[bool], label: str) -> list[tf.Tensor]:
        """Returns the sums and the means over all ranks; the first means count the rows of all ranks, too."""
        counts, shares = any(are_means) and not self._rows.is_counted, []
        for x, is_mean in zip(tensors, are_means, strict=True):
            if is_mean:  # of no rows it is NaN, and counts nothing
                factor = self._rows.rows if counts else self._rows.weight()
                shares.append(tf.math.multiply_no_nan(_floating(x), tf.cast(factor, _floating(x).dtype)))
            else:
                shares.append(self._of_rows(x))
        if not counts:
            return self.reduced(shares, "sum", label)
        own = tf.cast(self._rows.rows, shares[are_means.index(True)].dtype)
        *totals, all_rows = self.reduced([*shares, own], "sum", label)
        self._rows.note_all_rows(all_rows)
        return [
            total / tf.cast(all_rows, total.dtype) if is_mean else total for total, is_mean in zip(totals, are_means, strict=True)
        ]

    def _of_rows(self, total: tf.Tensor) -> tf.Tensor:
        """Returns a rank's part of a sum; of no rows it may be NaN, and is 0."""
        if not total.dtype.is_floating:
            return total
        has_none = tf.logical_and(tf.equal(self._rows.rows, 0), tf.math.is_nan(total))
        return tf.where(has_none, tf.zeros_like(total), total)


def _floating(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float64) if x.dtype.is_integer else wide(x)


def wide(x: tf.Tensor) -> tf.Tensor:
    """Returns `x` in a dtype that bears sums of many."""
    return tf.cast(x, _WIDE.get(x.dtype, x.dtype))
