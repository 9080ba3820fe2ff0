"""Sums over the rows of a batch, of gradients of rows, that a step makes by the chain rule: summands of gradients of weights.

    of_hidden = tape.gradient(loss, hidden)                 gradients of rows
    of_kernel = tf.matmul(x, of_hidden, transpose_a=True)   a sum over rows: this
    of_kernel + 0.01 * kernel                               is computed of it

The ranks' sums add up to that of the global batch; of what is added to it, or of its norm, nothing can be told without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.sharding.row_kinds import RowKind, RowKinds

_SUMMING = ("Einsum", "MatMul", "Sum", "UnsortedSegmentSum")
_OF_WEIGHTS = ("Placeholder", "ReadVariableOp")


def sums_of_rows(
    tensors: Iterable[tf.Tensor], rows: Iterable[tf.Tensor], program: RankProgram, is_end: Callable[[tf.Tensor], bool]
) -> list[tf.Tensor]:
    """Returns the sums over rows that `tensors` are computed of, and that are computed of `rows`, gradients of rows.

    Args:
        is_end: whether nothing behind a tensor is looked at.
    """
    gradients = {x.name for x in rows if tf.is_symbolic_tensor(x) and x.graph is program.graph}
    leaves = [x for x in tf.nest.flatten(program.arguments) if isinstance(x, tf.Tensor) and tf.is_symbolic_tensor(x)]
    arguments = {leaf.name: RowKind.ROWS if leaf.shape.rank else RowKind.OTHER for leaf in leaves}

    def of_source(x: tf.Tensor) -> RowKind | None:
        if x.name in gradients:
            return RowKind.ROWS
        is_same = x.op.type in _OF_WEIGHTS or x.op.type.startswith("Collective")
        return arguments.get(x.name, RowKind.SAME if is_same else None)

    kinds, found = RowKinds(of_source), []
    waiting = [x for x in tensors if x.graph is program.graph]
    seen = {x.name for x in waiting}
    for x in waiting:
        if is_end(x) or x.name in gradients or x.name in arguments:
            continue
        if (kinds.kind(x) is RowKind.SUM or _sums_away_rows(x)) and _is_of(x, gradients):
            found.append(x)
            continue
        new = [source for source in x.op.inputs if source.name not in seen and source.dtype != tf.resource]
        seen.update(source.name for source in new)
        waiting.extend(new)
    return found


def _sums_away_rows(x: tf.Tensor) -> bool:
    """Whether `x` is a sum over an axis whose size is known only when the step runs, as that of rows."""
    sizes_are_known = [source.shape.is_fully_defined() for source in x.op.inputs]
    return x.op.type in _SUMMING and x.shape.is_fully_defined() and not all(sizes_are_known)


def _is_of(tensor: tf.Tensor, names: set[str]) -> bool:
    waiting, seen = [tensor], {tensor.name}
    for x in waiting:
        if x.name in names:
            return True
        new = [source for source in x.op.inputs if source.name not in seen]
        seen.update(source.name for source in new)
        waiting.extend(new)
    return False
