"""Layouts: the part of a variable that each rank stores. Arithmetic only: no TensorFlow here.

global (5, 4), tensor axis 1 in 2 shards, then flat shards over data = 4: 10 elements a half, 3 a rank, 2 of padding

    ┌───────┬───────┐        tensor 0: a b c d e f g h i j
    │ a b   │ k l   │           data 0: a b c    data 1: d e f    data 2: g h i    data 3: j · ·
    │ c d   │ m n   │        tensor 1: k l m n o p q r s t
    │ e f   │ o p   │           data 0: k l m    data 1: n o p    data 2: q r s    data 3: t · ·
    │ g h   │ q r   │
    │ i j   │ s t   │
    └───────┴───────┘
"""

import dataclasses
import math

import numpy as np

from tfdist import errors
from tfdist.mesh import Coordinate, DeviceMesh
from tfdist.sharding.placements import Own, Partial, Replicate, Shard


@dataclasses.dataclass(frozen=True)
class Layout:
    """Maps a variable of a global shape to the components that the ranks store.

    Two ways to shard combine: first a tensor axis over the mesh's `tensor` axis (column, row or vocabulary parallel), then
    what is left, flattened and padded, over `data` (ZeRO), within each sharding group of the mesh. `pipe_owners` says which pipe
    ranks (coordinates of the axis "pipe") store the variable at all.

    Args:
        shape: the global shape.
        mesh: the mesh; only its axis sizes matter.
        tensor: `Replicate()` or `Shard(axis)` over the mesh's tensor axis.
        data: `Replicate()`, `Shard()` (flat), `Own(rank)` or `Partial()` over the mesh's data axis.
        pipe_owners: the pipe ranks that store the variable, ascending; None: all of them.

    Raises:
        ValueError: another placement, the tensor axis does not exist, its size is not divisible, or `pipe_owners` are
            none, not ascending or outside the mesh.
    """

    shape: tuple[int, ...]
    mesh: DeviceMesh
    tensor: Replicate | Shard = Replicate()
    data: Replicate | Shard | Own | Partial = Replicate()
    pipe_owners: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if not isinstance(self.tensor, Replicate | Shard):
            raise errors.value_error("`tensor` must be `Replicate()` or `Shard(axis)`.", tensor=self.tensor)
        if not isinstance(self.data, Replicate | Shard | Own | Partial):
            expected = "`data` must be `Replicate()`, `Shard()`, `Own(rank)` or `Partial()`."
            raise errors.value_error(expected, data=self.data)
        if isinstance(self.data, Own) and not 0 <= self.data.rank < self.mesh.num_shards:
            raise errors.value_error(f"`data` must be owned by a rank in [0, {self.mesh.num_shards}).", data=self.data)
        if self.is_tensor_sharded:
            axis, parts = self.tensor.axis, self.mesh.tensor_parallel_size
            if axis is None or not 0 <= axis < len(self.shape):
                raise errors.value_error(f"`tensor` must shard one of the {len(self.shape)} axes.", tensor=self.tensor)
            if self.shape[axis] % parts and not self.tensor.is_padded:
                lower = max(self.shape[axis] // parts, 1) * parts
                raise errors.value_error(
                    f"`tensor` splits axis {axis} of shape {self.shape} in {parts} equal shards, but {parts} does not "
                    f"divide {self.shape[axis]}.",
                    tensor=self.tensor,
                    fix=f"Sizes that work: {lower}, {lower + parts}.",
                )
        if isinstance(self.data, Shard) and self.data.axis is not None:
            raise errors.value_error("`data` shards are flat: `Shard()` without an axis.", data=self.data)
        if self.pipe_owners is not None:
            owners, size = tuple(self.pipe_owners), self.mesh.pipeline_parallel_size
            if not owners or list(owners) != sorted(set(owners)) or not 0 <= owners[0] <= owners[-1] < size:
                raise errors.value_error(f"`pipe_owners` must be ascending coordinates in [0, {size}).", pipe_owners=owners)
            object.__setattr__(self, "pipe_owners", owners)

    @property
    def is_data_sharded(self) -> bool:
        return isinstance(self.data, Shard)

    @property
    def is_tensor_sharded(self) -> bool:
        return isinstance(self.tensor, Shard)

    @property
    def is_sharded(self) -> bool:
        """Whether some rank stores less than all of the variable."""
        return isinstance(self.data, Shard | Own) or self.is_tensor_sharded or self.pipe_owners is not None

    @property
    def num_elements(self) -> int:
        """Elements of the global variable."""
        return math.prod(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of a shard over the tensor axis, padding included, not flat yet: what a layer inside a replica computes with."""
        if not self.is_tensor_sharded:
            return self.shape
        local = list(self.shape)
        local[self.tensor.axis] = -(-local[self.tensor.axis] // self.mesh.tensor_parallel_size)
        return tuple(local)

    @property
    def local_elements(self) -> int:
        return math.prod(self.local_shape)

    @property
    def num_shards(self) -> int:
        """How many flat data shards there are of what is sharded: of each a copy in every sharding group."""
        return self.mesh.num_shards

    @property
    def shard_elements(self) -> int:
        """Elements of one flat data shard, padding included: ceil(local elements / number of shards)."""
        return -(-self.local_elements // self.num_shards)

    @property
    def padding(self) -> int:
        """Elements of padding over all data shards together; less than their number."""
        return self.shard_elements * self.num_shards - self.local_elements

    @property
    def component_shape(self) -> tuple[int, ...]:
        """Shape of what a rank stores that stores a part at all."""
        return (self.shard_elements,) if self.is_data_sharded else self.local_shape

    @property
    def data_owner(self) -> int | None:
        """The place in its sharding group of the rank that stores all of it; None: every rank stores a part or a copy."""
        return self.data.rank if isinstance(self.data, Own) else None

    def stores(self, coordinate: Coordinate) -> bool:
        """Whether the rank at `coordinate` stores a part of the variable."""
        is_stage = self.pipe_owners is None or coordinate.pipe in self.pipe_owners
        return is_stage and self.data_owner in (None, self.mesh.shard_rank(coordinate))

    def counts_along(self, mesh_axis: str, coordinate: Coordinate) -> bool:
        """Whether what the rank at `coordinate` stores counts in a sum over the ranks along `mesh_axis`: of copies the first."""
        if mesh_axis == "pipe":
            return coordinate.pipe == self.first_pipe
        if mesh_axis == "data":
            return coordinate.data < (self.num_shards if self.is_data_sharded else 1)
        return self.is_tensor_sharded or coordinate.tensor == 0

    def holders(self, mesh_axis: str) -> tuple[int, ...] | None:
        """Returns the places along `mesh_axis` of the only ranks that store a part of the variable; None: all do."""
        if mesh_axis == "pipe":
            return self.pipe_owners
        if mesh_axis == "data" and isinstance(self.data, Own):
            return tuple(range(self.data.rank, self.mesh.data_parallel_size, self.num_shards))
        return None

    @property
    def first_pipe(self) -> int:
        """The first pipe rank that stores the variable."""
        return self.pipe_owners[0] if self.pipe_owners else 0

    def tensor_slices(self, coordinate: Coordinate) -> tuple[slice, ...]:
        """Returns the index of the tensor shard at `coordinate` in the global variable, without its padding."""
        slices = [slice(None)] * len(self.shape)
        if self.is_tensor_sharded:
            size, length = self.shape[self.tensor.axis], self.local_shape[self.tensor.axis]
            start = min(coordinate.tensor * length, size)
            slices[self.tensor.axis] = slice(start, min(start + length, size))
        return tuple(slices)

    def tensor_padding(self, coordinate: Coordinate) -> list[list[int]]:
        """Returns, per axis, [0, zeros that follow the tensor shard at `coordinate`]."""
        paddings = [[0, 0] for _ in self.shape]
        if self.is_tensor_sharded:
            index = self.tensor_slices(coordinate)[self.tensor.axis]
            paddings[self.tensor.axis][1] = self.local_shape[self.tensor.axis] - (index.stop - index.start)
        return paddings

    def flat_range(self, coordinate: Coordinate) -> tuple[int, int]:
        """Returns [start, stop) of the data shard at `coordinate` in the flattened local tensor, without its padding."""
        start = min(self.mesh.shard_rank(coordinate) * self.shard_elements, self.local_elements)
        return start, min(start + self.shard_elements, self.local_elements)

    def shard(self, full: np.ndarray, coordinate: Coordinate) -> np.ndarray:
        """Returns the component that the rank at `coordinate` stores of the global array `full`; `assembly.join` inverts it.

        Empty for a rank that another one owns the variable for. `packing` does the same with tensors, and is tested against it.
        """
        if not self.stores(coordinate):
            return np.zeros((0,), np.asarray(full).dtype)
        local = np.asarray(full).reshape(self.shape)[self.tensor_slices(coordinate)]
        if self.is_tensor_sharded:
            local = np.pad(local, self.tensor_padding(coordinate))
        if not self.is_data_sharded:
            return local.copy()
        start, stop = self.flat_range(coordinate)
        component = np.zeros(self.component_shape, local.dtype)
        component[: stop - start] = local.reshape(-1)[start:stop]
        return component
