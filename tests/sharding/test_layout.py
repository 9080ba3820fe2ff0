"""Layouts: exact round trips and exact sizes, for odd shapes on every mesh."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from tfdist.mesh import MESH_AXES, Coordinate, DeviceMesh
from tfdist.sharding import Layout, Partial, Replicate, Shard, assembly
from tfdist.sharding.placements import Own

SHAPES = [(), (1,), (5,), (7, 15), (33, 65), (2, 3, 5), (0,), (4, 0), (0, 6, 2)]
MESHES = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (1, 1, 2), (1, 3, 1), (2, 1, 2), (4, 1, 2), (3, 2, 2), (8, 1, 1)]
HYBRID = [(4, 1, 1, 2), (4, 1, 2, 2), (6, 2, 1, 3), (2, 1, 1, 1)]  # and the size of a sharding group


def mesh_of(shape):
    data, pipe, tensor, *group = shape
    devices = tuple(f"CPU:{index}" for index in range(data * pipe * tensor))
    return DeviceMesh(devices, pipe, tensor, *group)


def layouts():
    """Every shape on every mesh, with every cut that divides, whole and flat over data, with and without an owner."""
    for shape, mesh_shape in itertools.product(SHAPES, [*MESHES, *HYBRID]):
        mesh = mesh_of(mesh_shape)
        cuts = [Shard(axis) for axis, size in enumerate(shape) if size % mesh.tensor_parallel_size == 0]
        pipe = range(mesh.pipeline_parallel_size)
        owners = [None, *((rank,) for rank in pipe), (pipe[0], pipe[-1])] if len(pipe) > 1 else [None]
        placements = [Replicate(), Shard(), Own(mesh.num_shards - 1)]
        for tensor, data, owner in itertools.product([Replicate(), *cuts], placements, owners):
            yield Layout(shape, mesh, tensor=tensor, data=data, pipe_owners=owner)


ALL = list(layouts())


def name(layout):
    tensor = layout.tensor.axis if isinstance(layout.tensor, Shard) else "-"
    flat = "flat" if layout.is_data_sharded else f"whole {layout.data}"
    return f"{layout.shape} on {layout.mesh.shape} in {layout.num_shards} axis {tensor} {flat} owner {layout.pipe_owners}"


def numbered(shape, dtype=np.float64):
    return np.arange(1, 1 + math.prod(shape), dtype=dtype).reshape(shape)


def components_of(layout, full):
    return {c: layout.shard(full, c) for c in layout.mesh.coordinates() if layout.stores(c)}


def joined(layout, components):
    return assembly.join(layout, lambda rank: tf.constant(components[layout.mesh.coordinate(rank)])).numpy()


def test_the_grid_is_not_empty():
    assert len(ALL) > 300
    assert sum(layout.padding > 0 and isinstance(layout.tensor, Shard) for layout in ALL) > 10


def test_what_is_sharded_is_joined_again():
    for layout in ALL:
        full = numbered(layout.shape)
        components = components_of(layout, full)
        for component in components.values():
            assert component.shape == layout.component_shape, name(layout)
            assert component.base is None, "a view would keep the full array alive"
        back = joined(layout, components)
        np.testing.assert_array_equal(back, full, err_msg=name(layout))
        assert back.dtype == full.dtype


def test_exact_sizes():
    """Within a sharding group the shards hold the local elements and less than N elements of padding, which are zero."""
    for layout in ALL:
        n = layout.mesh.num_shards
        parts = layout.mesh.tensor_parallel_size if isinstance(layout.tensor, Shard) else 1
        assert layout.num_elements == math.prod(layout.shape)
        assert layout.local_elements * parts == layout.num_elements, name(layout)
        assert math.prod(layout.local_shape) == layout.local_elements
        assert layout.shard_elements * n == layout.local_elements + layout.padding, name(layout)
        assert 0 <= layout.padding < n, name(layout)
        components = components_of(layout, numbered(layout.shape))
        if layout.is_data_sharded:
            owners = layout.mesh.pipeline_parallel_size if layout.pipe_owners is None else len(layout.pipe_owners)
            copies = owners * layout.mesh.tensor_parallel_size // parts * (layout.mesh.data_parallel_size // n)
            stored = sum(component.size for component in components.values())
            assert stored == copies * (layout.num_elements + parts * layout.padding), name(layout)
            zeros = sum(int(np.sum(component == 0)) for component in components.values())
            assert zeros == copies * parts * layout.padding, name(layout)
        else:
            assert all(component.size == layout.local_elements for component in components.values())


def test_flat_ranges_partition_the_local_tensor():
    for layout in ALL:
        for pipe, tensor in itertools.product(*map(range, layout.mesh.shape[1:])):
            stop = 0
            for data in range(layout.mesh.data_parallel_size):
                stop = 0 if data % layout.num_shards == 0 else stop
                start, end = layout.flat_range(Coordinate(data, pipe, tensor))
                assert start == stop, name(layout)
                assert 0 <= end - start <= layout.shard_elements
                stop = end
            assert stop == layout.local_elements, name(layout)


def test_cut_along_a_tensor_axis_and_then_flat():
    """The example of the module's picture: (5, 4), axis 1 in 2 parts, then 4 flat shards."""
    mesh = mesh_of((4, 1, 2))
    layout = Layout((5, 4), mesh, tensor=Shard(1), data=Shard())
    assert (layout.local_shape, layout.shard_elements, layout.padding) == ((5, 2), 3, 2)
    full = np.array([list("abkl"), list("cdmn"), list("efop"), list("ghqr"), list("ijst")]).view(np.int32).reshape(5, 4)
    letters = {c: "".join(chr(x) if x else "." for x in layout.shard(full, c)) for c in mesh.coordinates()}
    assert [letters[Coordinate(data, 0, 0)] for data in range(4)] == ["abc", "def", "ghi", "j.."]
    assert [letters[Coordinate(data, 0, 1)] for data in range(4)] == ["klm", "nop", "qrs", "t.."]
    assert layout.tensor_slices(Coordinate(3, 0, 1)) == (slice(None), slice(2, 4))


def test_fewer_elements_than_ranks():
    layout = Layout((5,), mesh_of((8, 1, 1)), data=Shard())
    shards = [layout.shard(numbered((5,)), Coordinate(data)).tolist() for data in range(8)]
    assert shards == [[1], [2], [3], [4], [5], [0], [0], [0]]
    scalar = Layout((), mesh_of((3, 1, 1)), data=Shard())
    assert [scalar.shard(np.float32(7), Coordinate(data)).tolist() for data in range(3)] == [[7], [0], [0]]
    assert (scalar.shard_elements, scalar.padding) == (1, 2)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64, np.bool_])
def test_dtypes_are_kept(dtype):
    layout = Layout((7, 3), mesh_of((4, 1, 1)), data=Shard())
    full = (numbered((7, 3)) % 2).astype(dtype)
    components = components_of(layout, full)
    assert {component.dtype for component in components.values()} == {np.dtype(dtype)}
    np.testing.assert_array_equal(joined(layout, components), full)


def test_pipe_owners():
    mesh = mesh_of((2, 3, 1))
    layout = Layout((5, 2), mesh, data=Shard(), pipe_owners=(2,))
    assert [c.pipe for c in mesh.coordinates() if layout.stores(c)] == [2, 2]
    assert all(Layout((5, 2), mesh, data=Shard()).stores(c) for c in mesh.coordinates())
    full = numbered((5, 2))
    components = components_of(layout, full)
    assert set(components) == {Coordinate(0, 2, 0), Coordinate(1, 2, 0)}
    np.testing.assert_array_equal(joined(layout, components), full)


def test_shapes_become_integers():
    layout = Layout(np.array([7, 15]), mesh_of((2, 1, 1)), data=Shard())
    assert layout.shape == (7, 15)
    assert layout == Layout([7, 15], mesh_of((2, 1, 1)), data=Shard())


@pytest.mark.parametrize("axis", [None, -1, 2])
def test_tensor_axis_must_exist(axis):
    with pytest.raises(ValueError, match="`tensor` must shard one of the 2 axes") as error:
        Layout((4, 4), mesh_of((1, 1, 2)), tensor=Shard(axis))
    assert f"Received: tensor=Shard(axis={axis})" in str(error.value)


def test_a_scalar_has_no_tensor_axis():
    with pytest.raises(ValueError, match="`tensor` must shard one of the 0 axes"):
        Layout((), mesh_of((1, 1, 2)), tensor=Shard(0))


@pytest.mark.parametrize(("size", "works"), [(15, "14, 16"), (1, "2, 4")])
def test_tensor_axis_must_divide(size, works):
    with pytest.raises(ValueError, match=rf"axis 1 of shape \(7, {size}\) in 2 equal shards, but 2 does not") as error:
        Layout((7, size), mesh_of((1, 1, 2)), tensor=Shard(1))
    assert "Received: tensor=Shard(axis=1)" in str(error.value)
    assert f"Sizes that work: {works}." in str(error.value)


def test_data_shards_are_flat():
    with pytest.raises(ValueError, match="`data` shards are flat") as error:
        Layout((4, 4), mesh_of((2, 1, 1)), data=Shard(0))
    assert "Received: data=Shard(axis=0)" in str(error.value)


@pytest.mark.parametrize("owners", [(-1,), (3,), (), (1, 0), (1, 1)])
def test_pipe_owners_must_be_in_the_mesh(owners):
    with pytest.raises(ValueError, match=r"`pipe_owners` must be ascending coordinates in \[0, 3\)") as error:
        Layout((4,), mesh_of((1, 3, 1)), pipe_owners=owners)
    assert f"Received: pipe_owners={owners}" in str(error.value)


@pytest.mark.parametrize(
    ("argument", "placement"),
    [("tensor", Partial()), ("tensor", None), ("tensor", "shard"), ("data", None), ("data", "shard"), ("data", "partial")],
)
def test_only_placements_are_layouts(argument, placement):
    with pytest.raises(ValueError, match=f"`{argument}`") as error:
        Layout((4,), mesh_of((2, 1, 2)), **{argument: placement})
    assert f"Received: {argument}={placement!r}" in str(error.value)


def test_a_value_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="reshape"):
        Layout((4, 3), mesh_of((2, 1, 1)), data=Shard()).shard(np.zeros((4, 4)), Coordinate())


def test_a_summand_has_the_whole_shape():
    layout = Layout((3, 5), mesh_of((3, 1, 1)), data=Partial())
    assert not layout.is_sharded and layout.component_shape == (3, 5)


def test_a_variable_counts_once_in_a_sum_over_all_ranks():
    mesh = DeviceMesh(tuple(f"CPU:{i}" for i in range(8)), pipeline_parallel_size=2, tensor_parallel_size=2)
    for changes, copies in [
        ({}, 1),
        ({"data": Shard()}, 2),
        ({"tensor": Shard(0)}, 2),
        ({"tensor": Shard(0), "data": Shard()}, 4),
        ({"pipe_owners": (1,), "data": Shard()}, 2),
        ({"pipe_owners": (0, 1)}, 1),
    ]:
        layout = Layout((6, 4), mesh, **changes)
        counted = [all(layout.counts_along(axis, coordinate) for axis in MESH_AXES) for coordinate in mesh.coordinates()]
        assert sum(counted) == copies


def test_holders():
    mesh = DeviceMesh(tuple(f"CPU:{i}" for i in range(4)), pipeline_parallel_size=2)
    layout = Layout((6,), mesh, data=Own(1), pipe_owners=(0,))
    assert [layout.holders(axis) for axis in MESH_AXES] == [(1,), (0,), None]
    assert [Layout((6,), mesh, data=Shard()).holders(axis) for axis in MESH_AXES] == [None] * 3
    assert Layout((6,), mesh_of((6, 1, 1, 3)), data=Own(1)).holders("data") == (1, 4)


def test_sharding_groups_have_copies():
    mesh = mesh_of((4, 1, 1, 2))
    layout = Layout((5,), mesh, data=Shard())
    shards = [layout.shard(numbered((5,)), coordinate).tolist() for coordinate in mesh.coordinates()]
    assert shards == [[1, 2, 3], [4, 5, 0]] * 2
    assert [layout.counts_along("data", coordinate) for coordinate in mesh.coordinates()] == [True, True, False, False]
    owned = Layout((5,), mesh, data=Own(1))
    assert [owned.stores(coordinate) for coordinate in mesh.coordinates()] == [False, True] * 2
    with pytest.raises(ValueError, match=r"owned by a rank in \[0, 2\)"):
        Layout((5,), mesh, data=Own(2))
