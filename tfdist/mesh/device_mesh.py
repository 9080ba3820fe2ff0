"""The devices as a grid with three named axes."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist import errors

MESH_AXES = ("data", "pipe", "tensor")
# The two axes of which the data axis is made: see `DeviceMesh`.
DATA_AXES = ("replicate", "shard")


@dataclasses.dataclass(frozen=True, order=True)
class Coordinate:
    """The place of one rank in the mesh: its index along each axis."""

    data: int = 0
    pipe: int = 0
    tensor: int = 0

    def along(self, mesh_axis: str) -> int:
        """Returns the index along `mesh_axis`."""
        return getattr(self, _checked_axis(mesh_axis))


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """All devices of a job as a grid `(data, pipe, tensor)`, tensor innermost.

    One device is one *rank*. Ranks are numbered in the order of `devices`, which fills the grid like a C array:

        rank = (data_rank * pipe_size + pipe_rank) * tensor_size + tensor_rank

    so the ranks of one tensor group are neighbours (the fastest links), and the devices of one copy of the model (one data
    index) are consecutive.

        8 devices, (data, pipe, tensor) = (2, 2, 2)      data 0: 0 1 | 2 3      tensor groups {0,1} {2,3} {4,5} {6,7}
                                                         data 1: 4 5 | 6 7      data groups   {0,4} {1,5} {2,6} {3,7}

    The data axis is a grid, too: what is sharded over it is sharded over `sharding_group_size` consecutive data ranks, and each
    such group has a copy (hybrid sharding):

        data_rank = replicate_rank * sharding_group_size + shard_rank

        8 devices, all on the data axis, in groups of 4        "shard" groups {0,1,2,3} {4,5,6,7}
                                                               "replicate" groups {0,4} {1,5} {2,6} {3,7}

    As a rule one group has all data ranks: "shard" groups are then those of "data", and "replicate" groups of one rank each.

    Args:
        devices: canonical device names, one per rank.
        pipeline_parallel_size: number of pipeline stages' ranks; 1 means off.
        tensor_parallel_size: number of ranks that share each layer; 1 means off.
        sharding_group_size: over how many data ranks is sharded what is sharded over the data axis; None: over all.
        hosts: the number of each rank's host; empty: all are on one.

    Raises:
        ValueError: there are no devices, a size is not a positive integer, `pipeline_parallel_size * tensor_parallel_size` does
            not divide the number of devices, or `sharding_group_size` not that of data ranks. Or a group has some ranks of a
            host, and not its others, besides ranks of another host.
    """

    devices: tuple[str, ...]
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    sharding_group_size: int | None = None
    hosts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        if not self.devices:
            raise errors.value_error("`devices` must name at least one device.", devices=self.devices)
        for name in ("pipeline_parallel_size", "tensor_parallel_size"):
            errors.check_integer(name, getattr(self, name), 1, fix="1 turns it off.")
        model_ranks = self.pipeline_parallel_size * self.tensor_parallel_size
        if len(self.devices) % model_ranks:
            raise errors.value_error(
                f"`pipeline_parallel_size` x `tensor_parallel_size` = {model_ranks} must divide the number of "
                f"devices, {len(self.devices)}.",
                pipeline_parallel_size=self.pipeline_parallel_size,
                tensor_parallel_size=self.tensor_parallel_size,
                devices=list(self.devices),
                fix="Choose sizes whose product divides the device count, or pass other `devices`.",
            )
        object.__setattr__(self, "hosts", tuple(self.hosts) or (0,) * self.world_size)
        self._check_sharding_groups()

    def _check_sharding_groups(self) -> None:
        group_size, size = self.sharding_group_size, self.data_parallel_size
        if group_size is None:
            return
        errors.check_integer("sharding_group_size", group_size, 1, fix="None shards over all data ranks.")
        received = {"sharding_group_size": group_size, "data ranks": size}
        if size % group_size:
            divisors = [str(number) for number in range(1, size + 1) if size % number == 0]
            raise errors.value_error(
                f"`sharding_group_size` must divide the number of data ranks, {size}.",
                fix=f"Sizes that work: {', '.join(divisors)}.",
                **received,
            )
        for group in self.groups("shard"):
            here = {self.hosts[rank] for rank in group}
            missing = [rank for rank in self.group_ranks("data", group[0]) if self.hosts[rank] in here and rank not in group]
            if len(here) > 1 and missing:
                raise errors.value_error(
                    "A sharding group must be within a host, or have all data ranks of its hosts; the group of ranks "
                    f"{list(group)} is on hosts {sorted(here)} and lacks ranks {missing} of them.",
                    hosts=self.hosts,
                    fix="Take the number of data ranks that a host has, a divisor or a multiple of it; or say with "
                    "`ranks_per_host` which ranks share a host, if these are not the hosts.",
                    **received,
                )

    @property
    def world_size(self) -> int:
        """Number of ranks, over all axes."""
        return len(self.devices)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks along the data axis."""
        return self.world_size // (self.pipeline_parallel_size * self.tensor_parallel_size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of the axes, in the order of `MESH_AXES`."""
        return (self.data_parallel_size, self.pipeline_parallel_size, self.tensor_parallel_size)

    @property
    def splits_layers(self) -> bool:
        """Whether ranks store different layers, so that a rank may store no weight of a model at all."""
        return self.pipeline_parallel_size > 1

    def size(self, mesh_axis: str) -> int:
        """Returns the number of ranks along `mesh_axis`, one of `MESH_AXES` or `DATA_AXES`."""
        if mesh_axis in DATA_AXES:
            return self.num_shards if mesh_axis == "shard" else self.data_parallel_size // self.num_shards
        return self.shape[MESH_AXES.index(_checked_axis(mesh_axis))]

    @property
    def num_shards(self) -> int:
        """Over how many ranks is sharded what is sharded over the data axis."""
        return self.sharding_group_size or self.data_parallel_size

    @property
    def is_hybrid(self) -> bool:
        """Whether what is sharded over the data axis is sharded within groups, each of which has a copy."""
        return self.num_shards < self.data_parallel_size

    def shard_rank(self, coordinate: Coordinate) -> int:
        """Returns the place of the rank at `coordinate` in the list of those over which its sharding group shards."""
        return coordinate.data % self.num_shards

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        """Whether `ranks` are on more than one host."""
        return len({self.hosts[rank] for rank in ranks}) > 1

    def coordinate(self, rank: int) -> Coordinate:
        """Returns the coordinate of `rank`; the inverse of `rank`."""
        if not 0 <= rank < self.world_size:
            raise errors.value_error(f"`rank` must be in [0, {self.world_size}).", rank=rank)
        rank, tensor = divmod(rank, self.tensor_parallel_size)
        data, pipe = divmod(rank, self.pipeline_parallel_size)
        return Coordinate(data, pipe, tensor)

    def rank(self, coordinate: Coordinate) -> int:
        """Returns the rank at `coordinate`; the inverse of `coordinate`."""
        for mesh_axis in MESH_AXES:
            if not 0 <= coordinate.along(mesh_axis) < self.size(mesh_axis):
                raise errors.value_error(f"`coordinate` must lie in a mesh of shape {self.shape}.", coordinate=coordinate)
        stage = coordinate.data * self.pipeline_parallel_size + coordinate.pipe
        return stage * self.tensor_parallel_size + coordinate.tensor

    def group_ranks(self, mesh_axis: str, rank: int) -> tuple[int, ...]:
        """Returns the ranks of `rank`'s group along `mesh_axis`, in axis order (`rank` is one of them).

        The axis is one of `MESH_AXES` or `DATA_AXES`.
        """
        here = self.coordinate(rank)
        if mesh_axis in DATA_AXES:
            along_data, place, size = self.group_ranks("data", rank), self.shard_rank(here), self.num_shards
            return along_data[here.data - place :][:size] if mesh_axis == "shard" else along_data[place::size]
        return tuple(self.rank(dataclasses.replace(here, **{mesh_axis: index})) for index in range(self.size(mesh_axis)))

    def groups(self, mesh_axis: str) -> list[tuple[int, ...]]:
        """Returns every group along `mesh_axis`; they partition the ranks."""
        return sorted({self.group_ranks(mesh_axis, rank) for rank in range(self.world_size)})

    def coordinates(self) -> list[Coordinate]:
        """Returns the coordinates of ranks 0, 1, ... in rank order."""
        return [self.coordinate(rank) for rank in range(self.world_size)]


def current_mesh() -> DeviceMesh | None:
    """Returns the mesh of the active `tf.distribute` strategy, or None when it is not one of tfdist's.

    This is the protocol by which layers and pipelines find the mesh without importing the strategies: a tfdist strategy has
    an attribute `mesh`.
    """
    mesh = getattr(tf.distribute.get_strategy(), "mesh", None)
    return mesh if isinstance(mesh, DeviceMesh) else None


def _checked_axis(mesh_axis: str) -> str:
    if mesh_axis not in MESH_AXES:
        raise errors.value_error(f"`mesh_axis` must be one of {MESH_AXES}.", mesh_axis=mesh_axis)
    return mesh_axis


def canonical(devices: Sequence[str]) -> tuple[str, ...]:
    """Returns full device names ("/job:localhost/replica:0/task:0/device:CPU:0") for short ones ("CPU:0")."""
    here = tf.DeviceSpec(job="localhost", replica=0, task=0)
    specs = [tf.DeviceSpec.from_string(device if device.startswith("/") else f"/device:{device}") for device in devices]
    return tuple(here.make_merged_spec(spec).to_string() for spec in specs)
