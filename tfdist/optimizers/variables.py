"""Which variable is meant: Keras's wraps the distributed one, which holds one of each local rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram


def variable_of(variable: Any) -> tf.Variable:
    """Returns the `tf.Variable` of a Keras variable, or `variable` itself."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def local_part(variable: Any, program: RankProgram) -> tf.Variable:
    """Returns what this rank stores of a distributed variable, of Keras or TensorFlow."""
    return variable_of(variable).values[program.local_index]
