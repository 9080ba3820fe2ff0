"""Whether a tensor that a tape is asked about is computed of weights alone, and not of the rows of the batch.

weights = [tf.convert_to_tensor(v) for v in model.trainable_variables]
tape.watch(weights)                            a model that is called with its weights, as a function of them
grads = tape.gradient(loss, weights)           summands of the ranks, as gradients of the variables are

rows = tf.gather(table, ids)                   of the rank's rows: what a tape returns for them is that of one device
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.placements.eager import EagerFacts
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import Replicate
from tfdist.placements.surroundings import reads_variables


def is_of_weights(source: Any, program: RankProgram) -> bool:
    """Whether `source`, a tensor, is the same on all ranks of `program`, as weights and what is computed of them are."""
    if not isinstance(source, tf.Tensor) or not source.dtype.is_floating:
        return False
    if not tf.is_symbolic_tensor(source):
        return program.is_eager and program.attachment(EagerFacts).is_of_weights(source)
    is_whole = program.exists_here(source) and program.attachment(Facts).of(source) == Replicate()
    return is_whole and reads_variables(source)
