"""Sums over the rows of a batch, of gradients of rows, that a step makes by the chain rule: summands of gradients of weights.

    of_hidden = tape.gradient(loss, hidden)                 gradients of rows
    of_kernel = tf.matmul(x, of_hidden, transpose_a=True)   a sum over rows: this
    of_kernel + 0.01 * kernel                               is computed of it
    of_kernel / tf.cast(tf.shape(x)[0], tf.float32)         divided by the rows of all ranks, for which their numbers are summed
    tf.reduce_mean(of_hidden, 0)                            a mean over the rank's own rows

The ranks' sums add up to that of the global batch; of what is added to it, or of its norm, nothing can be told without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import tensorflow as tf

from tfdist.collectives import RankProgram, group_ops
from tfdist.graphs import tape
from tfdist.graphs.constants import value_of
from tfdist.sharding.row_kinds import RowKind, RowKinds, of_collective, reduced_axes

_SUMMING = ("Einsum", "MatMul", "Sum", "UnsortedSegmentSum")
_OF_WEIGHTS = ("Placeholder", "ReadVariableOp")


class SumsOfRows:
    """The sums and means over rows of `rows`, gradients of rows, in the graph of one rank's program.

    Args:
        is_end: whether nothing behind a tensor is looked at.
    """

    def __init__(self, rows: Iterable[tf.Tensor], program: RankProgram, is_end: Callable[[tf.Tensor], bool]):
        self._program = program
        self._is_end = is_end
        gradients = [x for x in rows if tf.is_symbolic_tensor(x) and x.graph is program.graph]
        self._gradients = {x.name for x in gradients}
        self._computed = _computed_of(gradients)
        leaves = [x for x in tf.nest.flatten(program.arguments) if isinstance(x, tf.Tensor) and tf.is_symbolic_tensor(x)]
        self._arguments = {leaf.name: RowKind.ROWS if leaf.shape.rank else RowKind.OTHER for leaf in leaves}
        self._sizes = {leaf.shape[0] for leaf in leaves if leaf.shape.rank and leaf.shape[0] is not None}
        self._of_all: dict[str, tf.Tensor] = {}  # by the name of a number that is a sum over the rank's rows: that of all ranks
        self._kinds = RowKinds(self._of_source)

    def found_in(self, tensors: Iterable[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the sums over rows, and the means, that `tensors` are computed of."""
        sums: list[tf.Tensor] = []
        means: list[tf.Tensor] = []

        def is_found(x: tf.Tensor) -> bool:
            is_mean = x.op.type == "Mean" and self._is_over_rows(x)
            is_sum = not is_mean and (self._kinds.kind(x) is RowKind.SUM or _sums_away_rows(x))
            if is_mean or is_sum:
                (means if is_mean else sums).append(x)
            return is_mean or is_sum

        self._walk(tensors, is_found)
        return sums, means

    def count_all_ranks(self, tensors: Iterable[tf.Tensor]) -> None:
        """Lets what is computed of gradients on the way to `tensors` read numbers that are sums over rows, such as how many there
        are, of all ranks' rows."""
        reads: list[tuple[tf.Operation, tf.Tensor]] = []

        def is_found(x: tf.Tensor) -> bool:
            numbers = [source for source in x.op.inputs if source.shape.rank == 0 and source.dtype.is_floating]
            reads.extend((x.op, number) for number in numbers if number.name not in self._computed)
            return False

        self._walk(tensors, is_found)
        for operation, number in reads:
            of_all = self._of_all_ranks(number)
            if of_all is not number:
                tape.reconnect(operation, number, of_all)
        self._kinds = RowKinds(self._of_source)

    def _of_all_ranks(self, number: tf.Tensor) -> tf.Tensor:
        kind = RowKind.SUM if self._is_number_of_rows(number) else self._kinds.kind(number)
        if number.shape.rank != 0 or kind not in (RowKind.SUM, RowKind.OTHER) or number.name in self._arguments:
            return number
        if number.name not in self._of_all:
            if kind is RowKind.SUM:
                ranks = self._program.group_ranks("data")
                total = group_ops.all_reduce(self._program, number, ranks, "sum", "all_reduce/number_of_rows")
            else:
                inputs = [self._of_all_ranks(source) for source in number.op.inputs]
                is_same = all(one is other for one, other in zip(inputs, number.op.inputs, strict=True))
                total = number if is_same else tape.with_inputs(number.op, inputs).outputs[number.value_index]
            self._of_all[number.name] = total
        return self._of_all[number.name]

    def _is_number_of_rows(self, number: tf.Tensor) -> bool:
        """Whether `number` is the constant that the rank's number of rows is, where that is known when the step is traced."""
        value = value_of(number)
        return value is not None and value.size == 1 and float(value) > 1 and float(value) in self._sizes

    def _walk(self, tensors: Iterable[tf.Tensor], is_found: Callable[[tf.Tensor], bool]) -> None:
        """Goes back from `tensors` along what is computed of gradients, as far as `is_found` is false."""
        waiting = [x for x in tensors if x.name in self._computed and x.graph is self._program.graph]
        seen = {x.name for x in waiting}
        for x in waiting:
            if self._is_end(x) or x.name in self._gradients or is_found(x):
                continue
            new = [source for source in x.op.inputs if source.name in self._computed and source.name not in seen]
            seen.update(source.name for source in new)
            waiting.extend(new)

    def _of_source(self, x: tf.Tensor) -> RowKind | tf.Tensor | None:
        if x.name in self._gradients:
            return RowKind.ROWS
        is_same = x.op.type in _OF_WEIGHTS or any(x is total for total in self._of_all.values())
        return self._arguments.get(x.name, RowKind.SAME if is_same else of_collective(x, self._program))

    def _is_over_rows(self, x: tf.Tensor) -> bool:
        """Whether `x` is a reduction along the axis of rows, whose size is theirs, or known only when the step runs."""
        given = x.op.inputs[0]
        axes = reduced_axes(x.op.inputs[1], given.shape.rank)
        is_along = axes is None or 0 in axes
        has_rows = bool(given.shape.rank) and (given.shape[0] is None or given.shape[0] in self._sizes)
        return is_along and (has_rows or self._kinds.kind(given) is RowKind.ROWS)


def _computed_of(tensors: Iterable[tf.Tensor]) -> set[str]:
    """Returns the names of `tensors` and of what is computed of them."""
    waiting = list(tensors)
    names = {x.name for x in waiting}
    for x in waiting:
        new = [output for operation in x.consumers() for output in operation.outputs if output.name not in names]
        names.update(output.name for output in new)
        waiting.extend(new)
    return names


def _sums_away_rows(x: tf.Tensor) -> bool:
    """Whether `x` is a sum over an axis whose size is known only when the step runs, as that of rows."""
    sizes_are_known = [source.shape.is_fully_defined() for source in x.op.inputs]
    return x.op.type in _SUMMING and x.shape.is_fully_defined() and not all(sizes_are_known)
