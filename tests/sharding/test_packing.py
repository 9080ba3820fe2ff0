"""How variables travel: inverse pairs, and the same shards as `Layout.shard`."""

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
def test_fulls_are_the_inverse_of_rows(number, n):
    fulls, layouts = group(number, n)
    rows = packing.rows_of([tf.constant(full) for full in fulls], layouts)
    assert [tuple(row.shape) for row in rows] == [(n, layout.shard_elements) for layout in layouts]
    for flattens in (False, True):
        found = [tf.reshape(row, [-1]) for row in rows] if flattens else rows
        for full, back in zip(fulls, packing.fulls_of(found, layouts), strict=True):
            np.testing.assert_array_equal(back, full)


@pytest.mark.parametrize(("number", "n"), GRID)
def test_rows_are_what_the_ranks_store(number, n):
    """A reduce-scatter of the rows cuts between ranks."""
    fulls, layouts = group(number, n)
    rows = packing.rows_of([tf.constant(full) for full in fulls], layouts)
    for rank, (full, layout, row) in itertools.product(range(n), zip(fulls, layouts, rows, strict=True)):
        np.testing.assert_array_equal(row[rank], layout.shard(full, Coordinate(rank)))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cut_shard_is_layout_shard(shape, n):
    layout = Layout(shape, DeviceMesh([f"CPU:{index}" for index in range(n)]), data=Shard())
    full = np.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    for rank in range(n):
        cut = packing.data_shard(tf.constant(full), layout, rank)
        assert cut.shape == layout.component_shape
        np.testing.assert_array_equal(cut, layout.shard(full, Coordinate(rank)))


def test_local_tensors_of_a_cut_tensor_axis():
    """With a tensor cut the full local tensor is packed, not the global one."""
    mesh = DeviceMesh([f"CPU:{index}" for index in range(6)], tensor_parallel_size=2)
    layout = Layout((5, 4), mesh, tensor=Shard(1), data=Shard())
    full = np.arange(20.0).reshape(5, 4)
    for tensor in range(2):
        part = full[layout.tensor_slices(Coordinate(0, 0, tensor))]
        (rows,) = packing.rows_of([tf.constant(part)], [layout])
        for data in range(3):
            np.testing.assert_array_equal(rows[data], layout.shard(full, Coordinate(data, 0, tensor)))
            np.testing.assert_array_equal(packing.data_shard(tf.constant(part), layout, data), rows[data])
        np.testing.assert_array_equal(packing.fulls_of([rows], [layout])[0], part)


def test_shapes_stay_static_in_a_graph():
    _, layouts = group(len(GROUPS) - 1, 4)

    @tf.function(autograph=False)
    def shapes(*fulls):
        rows = packing.rows_of(fulls, layouts)
        back = packing.fulls_of(rows, layouts)
        shards = [packing.data_shard(full, layout, 3) for full, layout in zip(fulls, layouts, strict=True)]
        assert [tuple(tensor.shape) for tensor in back] == [layout.local_shape for layout in layouts]
        assert [tuple(tensor.shape) for tensor in shards] == [layout.component_shape for layout in layouts]
        return rows

    shapes.get_concrete_function(*[tf.TensorSpec(layout.shape) for layout in layouts])


def test_a_vector_costs_no_reshape():
    """A transformer has many, and each operation takes time to trace."""
    layout = Layout((6,), DeviceMesh(["CPU:0", "CPU:1"]), data=Shard())

    @tf.function(autograph=False)
    def there_and_back(vector):
        (rows,) = packing.rows_of([vector], [layout])
        return packing.data_shard(vector, layout, 1), packing.fulls_of([vector], [layout]), rows

    operations = there_and_back.get_concrete_function(tf.TensorSpec([6])).graph.get_operations()
    assert [one.type for one in operations].count("Reshape") == 1  # to rows


def test_groups_must_match():
    fulls, layouts = group(len(GROUPS) - 2, 2)
    with pytest.raises(ValueError, match="zip"):
        packing.rows_of([tf.constant(full) for full in fulls[:-1]], layouts)
