"""A rank's part of a variable: the part that it stores, and the part that it steps on."""

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.mesh import Coordinate
from tfdist.optimizers.stand_in import StandIn
from tfdist.sharding import Layout, MeshConfig, packing


def variable_of(variable: Any) -> tf.Variable:
    """Returns the `tf.Variable` of a Keras variable, or `variable` itself."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def local_part(variable: Any, program: RankProgram) -> tf.Variable:
    """Returns what this rank stores of a distributed variable, of Keras or TensorFlow."""
    return variable_of(variable).values[program.local_index]


@dataclasses.dataclass(frozen=True)
class Target:
    """The part of a parameter that this rank steps on: its stored part, or its shard of a parameter that it stores whole.

    stage              the rank steps on               published by
    0                  the copy that it stores         nothing: all ranks step alike
    1, 2               its shard of the copy           an all-gather of a bucket's shards
    1, 2, rounded      its exact shard                 an all-gather of differences to the copies (`exact_shards`)
    3                  the shard that it stores        nothing
    1 to 3, owned      the whole, on its owner         a broadcast; the slots stay with the owner

    `layout` is the part that each rank stores of the parameter, `state_layout` the part that it steps on and stores of the
    optimizer's slots. `exact` is the exact shard of a parameter whose copies are rounded, None of any other.
    """

    variable: tf.Variable
    stored: tf.Variable
    layout: Layout
    state_layout: Layout
    program: RankProgram
    exact: tf.Variable | None = None

    @classmethod
    def of(cls, variable: Any, config: MeshConfig, program: RankProgram) -> "Target":
        """Returns the target of a parameter, of Keras or TensorFlow."""
        variable = variable_of(variable)
        layout = variable.layout
        exact = None if variable.exact is None else local_part(variable.exact, program)
        return cls(variable, local_part(variable, program), layout, config.slot_layout(layout), program, exact)

    @property
    def is_stored(self) -> bool:
        """Whether this rank stores the parameter, or a part of it: a rank may store some layers only."""
        return self.layout.stores(self._coordinate)

    @property
    def is_in_place(self) -> bool:
        """Whether the rank steps on what it stores of the parameter itself."""
        return self.layout.is_data_sharded == self.state_layout.is_data_sharded

    @property
    def stepped(self) -> tf.Variable:
        """The variable in which is what the rank steps on: all of it, or the copy of which that is a shard."""
        return self.stored if self.exact is None else self.exact

    def read(self, stepped: tf.Variable | StandIn) -> tf.Tensor:
        """Returns what the rank steps on, of what is `stepped`."""
        value = stepped.value()
        if self._is_all_stepped:
            return value
        return packing.data_shard(value, self.state_layout, self._coordinate.data, self.program.constant)

    def keep(self, value: tf.Tensor, stepped: tf.Variable | StandIn) -> list[tf.Tensor]:
        """Stores the new `value` of all of what is `stepped`; returns that of a shard, which is to be gathered first."""
        if not self._is_all_stepped:
            return [value]
        stepped.assign(value, read_value=False)
        return []

    def store_global(self, value: tf.Tensor) -> None:
        """Stores this rank's part of the global tensor `value`."""
        self.stored.assign(packing.stored_part(value, self.layout, self._coordinate), read_value=False)

    @property
    def _is_all_stepped(self) -> bool:
        return self.is_in_place or self.exact is not None

    @property
    def _coordinate(self) -> Coordinate:
        return self.program.mesh.coordinate(self.program.rank)
