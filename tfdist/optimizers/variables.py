"""Which variable is meant: Keras's wraps the distributed one, which holds one of each local rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.sharding import Layout, MeshConfig


def variable_of(variable: Any) -> tf.Variable:
    """Returns the `tf.Variable` of a Keras variable, or `variable` itself."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def layout_of(variable: tf.Variable, config: MeshConfig) -> Layout:
    """Returns the layout of a parameter, also of one that every rank stores whole."""
    del config
    return variable.layout


def is_data_sharded(variable: tf.Variable) -> bool:
    """Whether each data rank stores a flat shard of `variable` only."""
    return variable.layout.is_data_sharded


def local_part(variable: tf.Variable, program: RankProgram) -> tf.Variable:
    """Returns what this rank stores of a distributed variable."""
    return variable.values[program.local_index]


def is_stored(variable: tf.Variable, program: RankProgram) -> bool:
    """Whether this rank stores `variable`, or a part of it: not of a layer in another stage of a pipeline."""
    return variable.layout.stores(program.mesh.coordinate(program.rank))
