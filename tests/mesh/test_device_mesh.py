"""The mesh: ranks, coordinates and groups."""

import dataclasses
import itertools

import pytest
import tensorflow as tf

import tfdist
from tfdist.mesh import DATA_AXES, MESH_AXES, Coordinate, DeviceMesh, current_mesh
from tfdist.mesh.device_mesh import canonical

SHAPES = list(itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 3)))


def mesh_of(shape):
    data, pipe, tensor = shape
    devices = tuple(f"CPU:{index}" for index in range(data * pipe * tensor))
    return DeviceMesh(devices, pipeline_parallel_size=pipe, tensor_parallel_size=tensor)


@pytest.mark.parametrize("shape", SHAPES)
def test_rank_and_coordinate_are_inverse(shape):
    mesh = mesh_of(shape)
    assert mesh.shape == shape
    assert mesh.world_size == shape[0] * shape[1] * shape[2]
    assert [mesh.size(axis) for axis in MESH_AXES] == list(shape)
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(mesh.world_size)] == list(range(mesh.world_size))
    assert mesh.coordinates() == [mesh.coordinate(rank) for rank in range(mesh.world_size)]
    assert mesh.coordinates() == sorted(mesh.coordinates())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", MESH_AXES)
def test_groups_partition_the_ranks(shape, axis):
    mesh = mesh_of(shape)
    groups = mesh.groups(axis)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
    for group in groups:
        assert len(group) == mesh.size(axis)
        for index, rank in enumerate(group):
            assert mesh.group_ranks(axis, rank) == group
            assert mesh.coordinate(rank).along(axis) == index
            assert dataclasses.replace(mesh.coordinate(rank), **{axis: 0}) == mesh.coordinate(group[0])


def test_the_documented_example():
    mesh = mesh_of((2, 2, 2))
    assert mesh.groups("tensor") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.groups("data") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.groups("pipe") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.coordinate(5) == Coordinate(data=1, pipe=0, tensor=1)


@pytest.mark.parametrize(("data", "pipe", "tensor", "group_size"), [(4, 1, 1, 2), (8, 1, 2, 4), (6, 2, 1, 3), (4, 1, 1, 1)])
def test_sharding_groups_divide_the_data_axis(data, pipe, tensor, group_size):
    """A data group is a grid of its own, with its sharding groups one after the other."""
    mesh = DeviceMesh(tuple(f"CPU:{index}" for index in range(data * pipe * tensor)), pipe, tensor, group_size)
    assert mesh.is_hybrid and [mesh.size(axis) for axis in DATA_AXES] == [data // group_size, group_size]
    for along_data in mesh.groups("data"):
        grid = [along_data[start : start + group_size] for start in range(0, data, group_size)]
        assert [group for group in mesh.groups("shard") if group[0] in along_data] == grid
        assert [group for group in mesh.groups("replicate") if group[0] in along_data] == list(zip(*grid, strict=True))
        assert [mesh.shard_rank(mesh.coordinate(rank)) for rank in along_data] == list(range(group_size)) * (data // group_size)


def test_as_a_rule_a_sharding_group_has_all_data_ranks():
    for mesh in (mesh_of((3, 2, 1)), DeviceMesh(("CPU:0", "CPU:1"), sharding_group_size=2)):
        assert mesh.groups("shard") == mesh.groups("data") and not mesh.is_hybrid
        assert mesh.groups("replicate") == [(rank,) for rank in range(mesh.world_size)]


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_the_size_of_a_sharding_group_is_checked(size):
    with pytest.raises(ValueError, match="`sharding_group_size` must be a positive integer") as error:
        DeviceMesh(("CPU:0", "CPU:1"), sharding_group_size=size)
    assert f"Received: sharding_group_size={size!r}" in str(error.value)


def test_a_sharding_group_divides_the_data_ranks():
    with pytest.raises(ValueError, match="must divide the number of data ranks, 4") as error:
        DeviceMesh(tuple(f"CPU:{index}" for index in range(8)), tensor_parallel_size=2, sharding_group_size=3)
    assert "Received: sharding_group_size=3" in str(error.value) and "Sizes that work: 1, 2, 4." in str(error.value)


def test_a_sharding_group_is_within_a_host_or_has_whole_hosts():
    devices = tuple(f"CPU:{index}" for index in range(12))
    hosts = tuple(rank // 3 for rank in range(12))
    for works in (1, 3, 6, 12):
        mesh = DeviceMesh(devices, sharding_group_size=works, hosts=hosts)
        assert [mesh.spans_hosts(group) for group in mesh.groups("shard")] == [works > 3] * (12 // works)
    for split in (2, 4):
        with pytest.raises(ValueError, match="within a host, or have all data ranks of its hosts") as error:
            DeviceMesh(devices, sharding_group_size=split, hosts=hosts)
        assert f"sharding_group_size={split}" in str(error.value) and "`ranks_per_host`" in str(error.value)
    DeviceMesh(devices, sharding_group_size=4)  # of one host


def test_devices_may_be_a_list():
    mesh = DeviceMesh(["CPU:0", "CPU:1"])
    assert mesh.devices == ("CPU:0", "CPU:1")
    assert mesh == DeviceMesh(("CPU:0", "CPU:1"))
    assert hash(mesh) == hash(DeviceMesh(("CPU:0", "CPU:1")))


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "tensor_parallel_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_sizes_must_be_positive_integers(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a positive integer") as error:
        DeviceMesh(("CPU:0", "CPU:1"), **{name: value})
    assert f"Received: {name}={value!r}" in str(error.value)


def test_no_devices():
    with pytest.raises(ValueError, match="`devices` must name at least one device") as error:
        DeviceMesh(())
    assert "Received: devices=()" in str(error.value)


def test_sizes_must_divide_the_devices():
    with pytest.raises(ValueError, match="`pipeline_parallel_size` x `tensor_parallel_size` = 6 .* devices, 4") as error:
        DeviceMesh(("CPU:0", "CPU:1", "CPU:2", "CPU:3"), pipeline_parallel_size=2, tensor_parallel_size=3)
    assert "pipeline_parallel_size=2, tensor_parallel_size=3, devices=['CPU:0'" in str(error.value)


@pytest.mark.parametrize("rank", [-1, 8])
def test_rank_outside_the_mesh(rank):
    with pytest.raises(ValueError, match=r"`rank` must be in \[0, 8\)") as error:
        mesh_of((2, 2, 2)).coordinate(rank)
    assert f"Received: rank={rank}" in str(error.value)


@pytest.mark.parametrize("axis", MESH_AXES)
@pytest.mark.parametrize("index", [-1, 2])
def test_coordinate_outside_the_mesh(axis, index):
    coordinate = Coordinate(**{axis: index})
    with pytest.raises(ValueError, match=r"`coordinate` must lie in a mesh of shape \(2, 2, 2\)") as error:
        mesh_of((2, 2, 2)).rank(coordinate)
    assert f"Received: coordinate={coordinate!r}" in str(error.value)


@pytest.mark.parametrize("method", ["size", "groups", "group_ranks", "along"])
def test_unknown_axis(method):
    mesh = mesh_of((2, 1, 1))
    calls = {
        "size": lambda: mesh.size("model"),
        "groups": lambda: mesh.groups("model"),
        "group_ranks": lambda: mesh.group_ranks("model", 0),
        "along": lambda: Coordinate().along("model"),
    }
    with pytest.raises(ValueError, match=r"`mesh_axis` must be one of \('data', 'pipe', 'tensor'\)") as error:
        calls[method]()
    assert "Received: mesh_axis='model'" in str(error.value)


def test_current_mesh(cpus):
    assert current_mesh() is None
    with tf.distribute.MirroredStrategy(cpus[:2]).scope():
        assert current_mesh() is None
    strategy = tfdist.ShardedStrategy(cpus[:3])
    with strategy.scope():
        assert current_mesh() is strategy.mesh
    assert strategy.mesh.shape == (3, 1, 1)


def test_canonical():
    full = "/job:localhost/replica:0/task:0/device:CPU:1"
    assert canonical(["CPU:1", "cpu:1", "/CPU:1", "/device:CPU:1", full]) == (full,) * 5
    assert canonical(["/job:worker/task:2/device:GPU:3"]) == ("/job:worker/replica:0/task:2/device:GPU:3",)
