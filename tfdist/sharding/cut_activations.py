"""Activations that leave a layer cut over the tensor axis: what says so.

The tensor carries a mark, as it may carry a Keras mask. It is on the very tensor that the layer returned, not on what is computed
from it. Who takes such tensors, and who gets them whole, is told in `tfdist.layers.cut_tensors`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, activations

_MARK = "_tfdist_cut"


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a tensor is cut.

    Attributes:
        axis: the axis of which this rank holds its part.
        size: its size as a whole, where parts may be padded; None: the sum of the parts.
    """

    axis: int
    size: int | None = None

    def local_shape(self, shape: tf.TensorShape, ranks: int) -> list[int | None]:
        """Returns the shape of a part of a whole tensor of `shape`."""
        local = list(shape)
        local[self.axis] = None if local[self.axis] is None else -(-local[self.axis] // ranks)
        return local

    def without_padding(self, whole: tf.Tensor) -> tf.Tensor:
        """Returns the parts of all ranks, joined, without what they were padded with."""
        if self.size is None or whole.shape[self.axis] == self.size:
            return whole
        return whole[tuple([slice(None)] * self.axis + [slice(0, self.size)])]


def set_cut(x: Any, cut: Cut | None) -> Any:
    """Says that `x` is this rank's part, and returns it; None: it is whole."""
    if cut is not None:
        setattr(x, _MARK, cut)
    return x


def cut_of(x: Any) -> Cut | None:
    """Returns how `x` is cut, None if it is whole."""
    return getattr(x, _MARK, None)


def cut_of_output(tensor: Any) -> Cut | None:
    """Returns how the value of a symbolic Keras tensor is cut inside replicas: as its layer's `output_cut` says."""
    operation = tensor._keras_history.operation
    axis_and_size = getattr(operation, "output_cut", None)
    return None if axis_and_size is None else Cut(axis_and_size.axis % len(tensor.shape), axis_and_size.size)


def may_hold_parts(program: RankProgram | None) -> bool:
    """Whether a layer may hand on, on this rank, a part of its output only."""
    return program is not None and program.mesh.tensor_parallel_size > 1


def held_spec(program: RankProgram | None, tensor: Any, rows: int | None) -> tf.TensorSpec:
    """Returns the spec of what this rank holds of the value of a symbolic Keras tensor, for a batch of `rows`."""
    cut = cut_of_output(tensor) if may_hold_parts(program) else None
    shape = tensor.shape if cut is None else cut.local_shape(tensor.shape, program.mesh.tensor_parallel_size)
    return tf.TensorSpec([rows, *shape[1:]], tensor.dtype)


def mark_as_held(program: RankProgram | None, x: tf.Tensor, tensor: Any) -> None:
    """Says of `x`, the value of a symbolic Keras tensor, whether it is whole, as the layer has said that returned it."""
    if may_hold_parts(program):
        set_cut(x, cut_of_output(tensor))


def gathered(program: RankProgram | None, x: tf.Tensor) -> tf.Tensor:
    """Returns `x` whole: gathered where this rank holds a part of it. Without a gradient."""
    cut = cut_of(x)
    if cut is None or not may_hold_parts(program):
        return x
    return cut.without_padding(activations.all_gather(program, x, "tensor", cut.axis, "gather_output"))
