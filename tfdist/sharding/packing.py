"""Packing variables for transport: many shards in one message, rank-major so that a reduce-scatter cuts between ranks.

    variables a (L=2 per shard), b (L=1), N = 2 ranks

        full gradients        a0 a0 | a1 a1      b0 | b1
        packed rows           rank 0:  a0 a0 b0
                              rank 1:  a1 a1 b1          (N, L_a + L_b)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.mesh import Coordinate
from tfdist.sharding.layout import Layout

# Turns a shape, a list of lengths or an axis in what an operation takes; `RankProgram.constant` shares one tensor for equal ones.
Constant = Callable[[Any], Any]


def _as_it_is(value: Any) -> Any:
    return value


def pack_shards(shards: Sequence[tf.Tensor], constant: Constant = _as_it_is) -> tf.Tensor:
    """Joins flat shards, each (L_v,), in one (sum L_v,); `split_shards` inverts it."""
    return tf.concat(shards, constant(0)) if len(shards) > 1 else shards[0]


def split_shards(packed: tf.Tensor, layouts: Sequence[Layout], constant: Constant = _as_it_is) -> list[tf.Tensor]:
    """Cuts (sum L_v,) in the variables' flat shards (L_v,); the inverse of `pack_shards`."""
    if len(layouts) == 1:
        return [packed]
    lengths = [layout.shard_elements for layout in layouts]
    return tf.split(packed, constant(lengths), constant(0), num=len(lengths))


def pack_full(fulls: Sequence[tf.Tensor], layouts: Sequence[Layout], constant: Constant = _as_it_is) -> tf.Tensor:
    """Joins full local tensors in (N, sum L_v), row i being what rank i stores; `unpack_full` inverts it."""
    rows = []
    for full, layout in zip(fulls, layouts, strict=True):
        if layout.padding:
            full = tf.pad(tf.reshape(full, constant([-1])), [[0, layout.padding]])
        rows.append(tf.reshape(full, constant([layout.mesh.data_parallel_size, layout.shard_elements])))
    return tf.concat(rows, constant(1)) if len(rows) > 1 else rows[0]


def unpack_full(packed: tf.Tensor, layouts: Sequence[Layout], constant: Constant = _as_it_is) -> list[tf.Tensor]:
    """Returns the full local tensors from all ranks' packed shards, (N, sum L_v) flattened; the inverse of `pack_full`.

    Each is made by an operation of its own.
    """
    columns = [packed]
    if len(layouts) > 1:
        lengths = [layout.shard_elements for layout in layouts]
        rows = tf.reshape(packed, constant([layouts[0].mesh.data_parallel_size, sum(lengths)]))
        columns = tf.split(rows, constant(lengths), constant(1), num=len(lengths))
    fulls = []
    for column, layout in zip(columns, layouts, strict=True):
        if layout.padding:
            column = tf.reshape(column, constant([-1]))[: layout.local_elements]
        fulls.append(tf.reshape(column, constant(list(layout.local_shape))))
    return fulls


def join_tensor_cuts(pieces: Sequence[tf.Tensor], layout: Layout) -> tf.Tensor:
    """Returns the global tensor from the local ones of all tensor ranks, in order; `cut_tensor` gives one of them back."""
    if not layout.is_tensor_sharded:
        return pieces[0]
    axis = layout.tensor.axis
    joined = tf.concat(pieces, axis)
    return joined if joined.shape[axis] == layout.shape[axis] else joined[tuple(slice(0, size) for size in layout.shape)]


def cut_tensor(whole: tf.Tensor, layout: Layout, coordinate: Coordinate) -> tf.Tensor:
    """Returns the local tensor at `coordinate` of a global one, padded with zeros where the layout is."""
    if not layout.is_tensor_sharded:
        return whole
    local, padding = whole[layout.tensor_slices(coordinate)], layout.tensor_padding(coordinate)
    return tf.pad(local, padding) if any(after for _, after in padding) else local


def cut_shard(full: tf.Tensor, layout: Layout, data_rank: int) -> tf.Tensor:
    """Returns data rank `data_rank`'s flat shard of a full local tensor, padded with zeros: (...) to (L,)."""
    flat = tf.reshape(full, [-1])
    start = min(data_rank * layout.shard_elements, layout.local_elements)
    stop = min(start + layout.shard_elements, layout.local_elements)
    part = flat[start:stop]
    missing = layout.shard_elements - (stop - start)
    return tf.pad(part, [[0, missing]]) if missing else part
