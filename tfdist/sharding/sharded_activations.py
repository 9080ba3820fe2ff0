"""Activations that leave a layer sharded over the tensor axis: what says so.

The tensor carries a mark, as it may carry a Keras mask. It is on the very tensor that the layer returned, not on what is computed
from it. Who takes such tensors, and who gets them whole, an extension knows, whose layers make them (`WHOLE`).
"""

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, activations
from tfdist.extensible import Place

_MARK = "_tfdist_shard"


@dataclasses.dataclass(frozen=True)
class ActivationShard:
    """How a tensor is sharded.

    Attributes:
        axis: the axis of which this rank holds a shard.
        size: its size as a whole, where shards may be padded; None: the sum of theirs.
    """

    axis: int
    size: int | None = None

    def local_shape(self, shape: tf.TensorShape, ranks: int) -> list[int | None]:
        """Returns the shape of a shard of a whole tensor of `shape`."""
        local = list(shape)
        local[self.axis] = None if local[self.axis] is None else -(-local[self.axis] // ranks)
        return local

    def without_padding(self, whole: tf.Tensor) -> tf.Tensor:
        """Returns the shards of all ranks, joined in `whole`, without what they were padded with."""
        if self.size is None or whole.shape[self.axis] == self.size:
            return whole
        return whole[tuple([slice(None)] * self.axis + [slice(0, self.size)])]


def mark_shard(x: Any, shard: ActivationShard | None) -> Any:
    """Says that `x` is this rank's `shard`, and returns it; None: it is whole."""
    if shard is not None:
        setattr(x, _MARK, dataclasses.replace(shard, axis=shard.axis % x.shape.rank))
    return x


def shard_of(x: Any) -> ActivationShard | None:
    """Returns how `x` is sharded, None if it is whole."""
    return getattr(x, _MARK, None)


def copy_mask(source: tf.Tensor, target: tf.Tensor) -> None:
    """Gives `target`, made of `source`, the mask that Keras has put on that."""
    mask = getattr(source, "_keras_mask", None)
    if mask is not None and target is not source:
        target._keras_mask = mask


def shard_of_output(tensor: Any) -> ActivationShard | None:
    """Returns how the value of a symbolic Keras tensor is sharded inside replicas: as its layer's `output_shard` says."""
    return getattr(tensor._keras_history.operation, "output_shard", None)


def may_hold_parts(program: RankProgram | None) -> bool:
    """Whether a layer may hand on, on this rank, a shard of its output only."""
    return program is not None and program.mesh.tensor_parallel_size > 1


def held_spec(program: RankProgram | None, tensor: Any, rows: int | None) -> tf.TensorSpec:
    """Returns the spec of what this rank holds of the value of a symbolic Keras tensor, for a batch of `rows`."""
    shard = shard_of_output(tensor) if may_hold_parts(program) else None
    shape = tensor.shape if shard is None else shard.local_shape(tensor.shape, program.mesh.tensor_parallel_size)
    return tf.TensorSpec([rows, *shape[1:]], tensor.dtype)


def mark_as_held(program: RankProgram | None, x: tf.Tensor, tensor: Any) -> None:
    """Says of `x`, the value of a symbolic Keras tensor, whether it is whole, as the layer has said that returned it."""
    if may_hold_parts(program):
        mark_shard(x, shard_of_output(tensor))


def gathered(program: RankProgram | None, x: tf.Tensor) -> tf.Tensor:
    """Returns `x` whole: gathered where this rank holds a shard of it. Without a gradient."""
    shard = shard_of(x)
    if shard is None or not may_hold_parts(program):
        return x
    whole = shard.without_padding(activations.all_gather(program, x, "tensor", shard.axis, "gather_output"))
    copy_mask(x, whole)
    return whole


class AllWhole:
    """No layer leaves its output sharded."""

    def all_whole(self, structure: Any) -> Any:
        """Returns a structure of tensors with those that are sharded gathered, on this rank's tapes."""
        return structure


WHOLE: Place[AllWhole] = Place(AllWhole())
