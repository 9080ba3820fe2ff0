"""Which rank computes, and whether a step's batch is cut over several."""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives import RankProgram, find_program
from tfdist.sharding import config_of
from tfdist.sharding.keras_scope import in_symbolic_scope


def rank_program() -> RankProgram | None:
    """Returns the program of the rank that is being traced, or that runs.

    None in cross-replica context, in Keras's symbolic build and under other strategies, where no rank computes a part.
    """
    if config_of(tf.distribute.get_strategy()) is None or in_symbolic_scope():
        return None
    return find_program()


def sharing_program() -> RankProgram | None:
    """Returns `rank_program` if other data ranks share the batch with it; None where one rank has it all."""
    program = rank_program()
    return program if program is not None and program.mesh.size("data") > 1 else None
