"""What an eager step computes of gradients of rows: where the rows are, and which of it is a sum over them.

of_hidden = tape.gradient(loss, hidden)                 (rows, units)
tf.transpose(of_hidden)                                 (units, rows): along axis 1
tf.matmul(x, of_hidden, transpose_a=True)               a sum over rows: a gradient made by hand
tf.reduce_sum(of_hidden**2)                             a scalar, a part of a loss or a log
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram

_DIVIDING = ("Div", "DivNoNan", "RealDiv")


class EagerRows:
    """The gradients of rows of one rank of an eager run, and what is computed of them."""

    def __init__(self, program: RankProgram) -> None:
        leaves = tf.nest.flatten(program.arguments)
        self._sizes = {leaf.shape[0] for leaf in leaves if tf.is_tensor(leaf) and leaf.shape.rank} - {0, 1}
        self._axes: dict[int, tuple[Any, int]] = {}  # tensors, and the axis along which their rows are, by id

    def note(self, grads: Iterable[tf.Tensor]) -> None:
        """Notes `grads`, which a tape has returned for rows."""
        self._axes.update((id(grad), (grad, 0)) for grad in grads)

    def is_of_rows(self, tensor: Any) -> bool:
        """Whether `tensor` is a gradient of rows, or computed of them row by row."""
        return id(tensor) in self._axes

    def follow(self, kind: str, inputs: Sequence[Any], attributes: Sequence[Any], outputs: Sequence[Any]) -> str | None:
        """Returns "Sum" or "Mean" of an operation that has made that of gradients of rows, over the rows; else None.

        What else it has computed of them is noted.
        """
        axes = [self._axes.get(id(x), (None, None))[1] for x in inputs]
        if all(axis is None for axis in axes):
            return None
        given = dict(zip(attributes[::2], attributes[1::2], strict=True))
        if len(outputs) == 1 and outputs[0].shape.rank and _is_over_rows(kind, inputs, given, axes):
            return "Mean" if kind == "Mean" else "Sum"
        axis = next(axis for axis in axes if axis is not None)
        if kind == "Transpose":
            axis = list(inputs[1].numpy()).index(axis)
        self._axes.update((id(output), (output, axis)) for output in outputs if output.dtype.is_floating and output.shape.rank)
        return None

    def may_average(self, kind: str, inputs: Sequence[Any]) -> bool:
        """Whether an operation divides by the rank's number of rows, or by a constant that happens to be the same."""
        if len(inputs) != 2 or kind not in ("Mul", *_DIVIDING):
            return False
        numbers = [x.numpy() for x in (inputs if kind == "Mul" else inputs[1:]) if x.shape.rank == 0]
        factors = [1 / x if kind == "Mul" and x else x for x in numbers]
        return any(abs(factor - size) < 1e-3 for factor in factors for size in self._sizes)


def _is_over_rows(kind: str, inputs: Sequence[Any], given: dict[str, Any], axes: Sequence[int | None]) -> bool:
    if kind == "MatMul":
        summed = (0 if given["transpose_a"] else 1, 1 if given["transpose_b"] else 0)
        return any(axis == one for axis, one in zip(axes, summed, strict=True))
    if kind in ("Mean", "Sum"):
        return axes[0] in [int(axis) % inputs[0].shape.rank for axis in tf.reshape(inputs[1], [-1]).numpy()]
    if kind == "Einsum":
        of_each, _, result = tf.compat.as_str(given["equation"]).partition("->")
        pairs = zip(of_each.split(","), axes, strict=True)
        return any(axis is not None and letters[axis : axis + 1] not in result for letters, axis in pairs)
    return kind == "UnsortedSegmentSum" and axes[0] == 0
