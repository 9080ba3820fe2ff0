"""Gradients of weights that a step of Keras's trainer makes itself of gradients of rows: by the chain rule, or as IndexedSlices.

    rows = tf.gather(table, ids)                                      of_rows = tape.gradient(loss, rows)
    optimizer.apply([tf.IndexedSlices(of_rows, ids)], [table])        counts the rank's weight already

What a tape returns for rows is one device's, and counts the rank's weight; the reduction, which takes what it is given for the
gradient of the rank's own mean, would count it again.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.optimizers.tape_gradients import TapeGradients
from tfdist.placements.eager import EagerFacts
from tfdist.placements.kinds import Partial
from tfdist.sharding.gradient_weight import GradientWeight


def of_own_mean(grad: tf.Tensor, program: RankProgram) -> tf.Tensor:
    """Returns `grad`, the dense value of what an optimizer was given, as the gradient of the rank's own mean.

    Without the rank's weight, that is, if it was made of gradients of rows.
    """
    weights = program.attachment(GradientWeight)
    if not weights.of_rows:
        return grad
    weight = weights.of_wholes()
    if weight is None or not _is_of_rows(grad, program):
        return grad
    return tf.math.divide_no_nan(grad, tf.cast(weight, grad.dtype))


def _is_of_rows(grad: tf.Tensor, program: RankProgram) -> bool:
    if program.is_eager:
        placement = program.attachment(EagerFacts).of(grad)
    else:
        placement = program.attachment(TapeGradients).placement_of(grad)
    return isinstance(placement, Partial) and placement.is_sum
