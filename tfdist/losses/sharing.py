"""Whether a step's batch is cut over several ranks."""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives import RankProgram, find_program
from tfdist.sharding import config_of
from tfdist.sharding.keras_scope import in_symbolic_scope


def sharing_program() -> RankProgram | None:
    """Returns the program of the rank that is being traced if other data ranks share the batch with it.

    None in eager code, in cross-replica context, in Keras's symbolic build and under other strategies, where no rank computes a
    part, and where one rank has it all.
    """
    if config_of(tf.distribute.get_strategy()) is None or in_symbolic_scope():
        return None
    program = find_program()
    return program if program is not None and program.mesh.size("data") > 1 else None
