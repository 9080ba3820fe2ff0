"""Packing: inverse pairs, and the same shards as `Layout.shard`."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from tfdist.mesh import Coordinate, DeviceMesh
from tfdist.sharding import Layout, Shard, packing

SHAPES = [(), (1,), (5,), (7, 15), (33, 65), (2, 3, 5), (0,), (4, 0)]
GROUPS = [[shape] for shape in SHAPES] + [[(7, 15), ()], [(5,), (0,), (2, 3)], SHAPES]
SIZES = [1, 2, 3, 4, 8]
GRID = list(itertools.product(range(len(GROUPS)), SIZES))


def group(number, n):
    """Returns tensors with distinct elements, and their layouts, flat over `n` ranks."""
    mesh = DeviceMesh([f"CPU:{index}" for index in range(n)])
    layouts = [Layout(shape, mesh, data=Shard()) for shape in GROUPS[number]]
    rng = np.random.default_rng(number)
    return [rng.normal(size=layout.shape).astype("float32") for layout in layouts], layouts


@pytest.mark.parametrize(("number", "n"), GRID)
def test_unpack_inverts_pack_full(number, n):
    fulls, layouts = group(number, n)
    packed = packing.pack_full([tf.constant(full) for full in fulls], layouts)
    assert packed.shape == [n, sum(layout.shard_elements for layout in layouts)]
    for full, back in zip(fulls, packing.unpack_full(packed, layouts), strict=True):
        np.testing.assert_array_equal(back, full)


@pytest.mark.parametrize(("number", "n"), GRID)
def test_rows_are_what_the_ranks_store(number, n):
    """Row i is rank i's shards, one after the other: a reduce-scatter of the rows cuts between ranks."""
    fulls, layouts = group(number, n)
    packed = packing.pack_full([tf.constant(full) for full in fulls], layouts)
    for rank in range(n):
        stored = [layout.shard(full, Coordinate(rank)) for full, layout in zip(fulls, layouts, strict=True)]
        np.testing.assert_array_equal(packed[rank], np.concatenate(stored))
        np.testing.assert_array_equal(packing.pack_shards([tf.constant(one) for one in stored]), packed[rank])
        for shard, back in zip(stored, packing.split_shards(packed[rank], layouts), strict=True):
            np.testing.assert_array_equal(back, shard)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cut_shard_is_layout_shard(shape, n):
    layout = Layout(shape, DeviceMesh([f"CPU:{index}" for index in range(n)]), data=Shard())
    full = np.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    for rank in range(n):
        cut = packing.cut_shard(tf.constant(full), layout, rank)
        assert cut.shape == layout.component_shape
        np.testing.assert_array_equal(cut, layout.shard(full, Coordinate(rank)))


def test_local_tensors_of_a_cut_tensor_axis():
    """With a tensor cut the full local tensor is packed, not the global one."""
    mesh = DeviceMesh([f"CPU:{index}" for index in range(6)], tensor_parallel_size=2)
    layout = Layout((5, 4), mesh, tensor=Shard(1), data=Shard())
    full = np.arange(20.0).reshape(5, 4)
    for tensor in range(2):
        part = full[layout.tensor_slices(Coordinate(0, 0, tensor))]
        packed = packing.pack_full([tf.constant(part)], [layout])
        for data in range(3):
            np.testing.assert_array_equal(packed[data], layout.shard(full, Coordinate(data, 0, tensor)))
            np.testing.assert_array_equal(packing.cut_shard(tf.constant(part), layout, data), packed[data])
        np.testing.assert_array_equal(packing.unpack_full(packed, [layout])[0], part)


def test_shapes_stay_static_in_a_graph():
    _, layouts = group(len(GROUPS) - 1, 4)

    @tf.function(autograph=False)
    def shapes(*fulls):
        packed = packing.pack_full(fulls, layouts)
        back = packing.unpack_full(packed, layouts)
        cut = [packing.cut_shard(full, layout, 3) for full, layout in zip(fulls, layouts, strict=True)]
        shards = packing.split_shards(packing.pack_shards(cut), layouts)
        assert [tuple(tensor.shape) for tensor in back] == [layout.local_shape for layout in layouts]
        assert [tuple(tensor.shape) for tensor in shards] == [layout.component_shape for layout in layouts]
        return packed

    shapes.get_concrete_function(*[tf.TensorSpec(layout.shape) for layout in layouts])


def test_groups_must_match():
    fulls, layouts = group(len(GROUPS) - 2, 2)
    with pytest.raises(ValueError, match="zip"):
        packing.pack_full(fulls[:-1], layouts)
