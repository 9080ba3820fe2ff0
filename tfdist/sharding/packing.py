"""How variables travel: of each a row for every rank of a sharding group, so that a reduce-scatter splits it between them.

    variables a (L=2 per shard), b (L=1), N = 2 ranks

        full gradients        a0 a0 | a1 a1      b0 | b1
        rows                  rank 0:  a0 a0     b0
                              rank 1:  a1 a1     b1          (N, L_a) and (N, L_b)

Several of them travel in one message (`collectives.group_ops`), side by side.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.mesh import Coordinate
from tfdist.sharding.layout import Layout

# Turns a shape, lengths, paddings or an axis in what an operation takes; `RankProgram.constant` shares one tensor for equal ones.
Constant = Callable[[Any], Any]


def _as_it_is(value: Any) -> Any:
    return value


def _flat(tensor: tf.Tensor, constant: Constant) -> tf.Tensor:
    return tensor if tensor.shape.rank == 1 else tf.reshape(tensor, constant([-1]))


def rows_of(fulls: Sequence[tf.Tensor], layouts: Sequence[Layout], constant: Constant = _as_it_is) -> list[tf.Tensor]:
    """Returns of each full local tensor (N, L_v), row i being what the i-th of a sharding group stores; `fulls_of` inverts it."""
    rows = []
    for full, layout in zip(fulls, layouts, strict=True):
        if layout.padding:
            full = tf.pad(_flat(full, constant), constant([[0, layout.padding]]))
        rows.append(tf.reshape(full, constant([layout.num_shards, layout.shard_elements])))
    return rows


def fulls_of(rows: Sequence[tf.Tensor], layouts: Sequence[Layout], constant: Constant = _as_it_is) -> list[tf.Tensor]:
    """Returns the full local tensors from (N, L_v) each, flattened or not, by an operation each; the inverse of `rows_of`."""
    fulls = []
    for row, layout in zip(rows, layouts, strict=True):
        if layout.padding:
            row = tf.slice(_flat(row, constant), constant([0]), constant([layout.local_elements]))
        fulls.append(row if row.shape == layout.local_shape else tf.reshape(row, constant(list(layout.local_shape))))
    return fulls


def side_by_side(tensors: Sequence[tf.Tensor], constant: Constant = _as_it_is) -> tf.Tensor:
    """Returns the elements of `tensors`, which are of one dtype, in one vector; `split` inverts it."""
    flat = [_flat(x, constant) for x in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, constant(0))


def split(flat: tf.Tensor, shapes: Sequence[tf.TensorShape], constant: Constant = _as_it_is) -> list[tf.Tensor]:
    """Returns the tensors of `shapes` whose elements are side by side in `flat`."""
    sizes = [shape.num_elements() for shape in shapes]
    parts = [flat] if len(sizes) == 1 else tf.split(flat, constant(sizes), constant(0), num=len(sizes))
    return [
        part if shape.rank == 1 else tf.reshape(part, constant(shape.as_list()))
        for part, shape in zip(parts, shapes, strict=True)
    ]


def join_tensor_shards(pieces: Sequence[tf.Tensor], layout: Layout) -> tf.Tensor:
    """Returns the global tensor from the local ones of all tensor ranks, in order; `tensor_shard` gives one of them back."""
    if not layout.is_tensor_sharded:
        return pieces[0]
    axis = layout.tensor.axis
    joined = tf.concat(pieces, axis)
    return joined if joined.shape[axis] == layout.shape[axis] else joined[tuple(slice(0, size) for size in layout.shape)]


def tensor_shard(whole: tf.Tensor, layout: Layout, coordinate: Coordinate) -> tf.Tensor:
    """Returns the local tensor at `coordinate` of a global one, padded with zeros where the layout is."""
    if not layout.is_tensor_sharded:
        return whole
    local, padding = whole[layout.tensor_slices(coordinate)], layout.tensor_padding(coordinate)
    return tf.pad(local, padding) if any(after for _, after in padding) else local


def stored_part(whole: tf.Tensor, layout: Layout, coordinate: Coordinate) -> tf.Tensor:
    """Returns what the rank at `coordinate` stores of a global tensor, if it stores a part."""
    local = tensor_shard(whole, layout, coordinate)
    return data_shard(local, layout, coordinate.data) if layout.is_data_sharded else local


def data_shard(full: tf.Tensor, layout: Layout, data_rank: int, constant: Constant = _as_it_is) -> tf.Tensor:
    """Returns data rank `data_rank`'s flat shard of a full local tensor, padded with zeros: (...) to (L,)."""
    start = min(data_rank % layout.num_shards * layout.shard_elements, layout.local_elements)
    size = min(layout.shard_elements, layout.local_elements - start)
    part = tf.slice(_flat(full, constant), constant([start]), constant([size]))
    missing = layout.shard_elements - size
    return tf.pad(part, constant([[0, missing]])) if missing else part
