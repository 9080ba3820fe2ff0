"""Gradients of weights that a step of Keras's trainer makes itself of gradients of rows: by the chain rule, or as IndexedSlices.

    rows = tf.gather(table, ids)                                      of_rows = tape.gradient(loss, rows)
    optimizer.apply([tf.IndexedSlices(of_rows, ids)], [table])        counts the rank's weight already

What a tape returns for rows is one device's, and counts the rank's weight; the reduction, which takes what it is given for the
gradient of the rank's own mean, would count it again.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.optimizers.eager_reads import EagerReads
from tfdist.optimizers.tape_gradients import TapeGradients
from tfdist.placements.kinds import Partial
from tfdist.sharding.eager_sums import EagerSums
from tfdist.sharding.gradient_weight import GradientWeight


def of_own_mean(grad: tf.Tensor, given: Any, program: RankProgram) -> tf.Tensor:
    """Returns `grad`, the dense value of what an optimizer was `given`, as the gradient of the rank's own mean.

    Without the rank's weight, that is, if it was made of gradients of rows.
    """
    weights = program.attachment(GradientWeight)
    if not weights.of_rows:
        return grad
    weight = weights.of_wholes()
    if weight is None or not _is_of_rows(grad, given, program):
        return grad
    return tf.math.divide_no_nan(grad, tf.cast(weight, grad.dtype))


def _is_of_rows(grad: tf.Tensor, given: Any, program: RankProgram) -> bool:
    if program.is_eager:
        return not program.attachment(EagerReads).knows(given) and program.attachment(EagerSums).is_of_rows(grad)
    placement = program.attachment(TapeGradients).placement_of(grad)
    return isinstance(placement, Partial) and placement.is_sum
