"""Losses inside `strategy.run`: a rank's share of the mean over the global batch, or its own mean.

Rank r has the weighted sum S_r of its examples' losses and a divisor D_r: how many losses there are (valid ones, under a mask),
or what their weights sum to. N ranks:

    Keras under tf.distribute      sum_r S_r / D_r / N          a mean of means
    one device, and tfdist         sum_r S_r / sum_s D_s        the mean of the global batch

The two differ as soon as the D_r do: in a last partial batch, with masks or with weights. Here the loss of rank r is its share,
S_r / sum_s D_s: shares, and so their gradients, add up to those of the global batch, and a rank without examples has share 0.
That is so in a training loop of one's own. In a step of Keras's trainer the loss of rank r is its own mean l_r, of which the
share is w_r l_r, where w_r is the rank's part of the batch's rows: l_r = S_r / sum_s D_s / w_r. Plain means over rows and
penalties of weights, which Keras does not see, are own means by themselves (see `trainer_step`).

In cross-replica context and in Keras's symbolic build no rank computes, and no loss is a share. Metrics add up numerators and
counts already (see `tfdist.metrics`).

                              shares                                           own means
    reduce_weighted_values    instead of the scaled local mean. One            the same; the first one counts the rows of all
                              all-reduce of 1 number, of 3 with a mask         ranks, too, in 1 number more
    scale_loss                `add_loss` and regularizers: weighted by rows.   they stay as they are
                              One all-reduce of 1 number a step
    unscale_loss              what is logged: the sum of the shares. One       the own mean, which trackers weigh by rows
                              all-reduce of 1 number, of 2 for the
                              reduction None

A rank's batch may also be fed in slices (see `sliced_batch`): then a loss is the slice's own mean, and who feeds it weighs the
sum of what a slice's loss consists of, Keras losses and plain means, by `SlicedBatch.weigh`.

A loss in a loop inside `strategy.run` (`tf.map_fn`) raises, as every collective does there.

Note: losses that are one number. A loss that returns a scalar has averaged its rank's batch itself (a function that ends in
`tf.reduce_mean`; `Dice` and `Tversky` without `axis`; `MeanSquaredError` of vectors). Keras does not scale such a loss, so that N
ranks would train N times as fast as one; it divides `add_loss` and `activity_regularizer` by N. Here each of these losses is
weighted by the rank's part of the batch's rows, which is exact if the loss is a mean over rows, or, as a weight's regularizer,
has nothing to do with rows. Of any other (a sum, `Dice`, a ratio of sums) the ranks agree on the numbers that it needs first (see
`placements.repair`). What `add_loss` gets from a Keras loss is a share already and stays one (a sum of such a share and of
another mean, in one call, would be mistaken for a share: call `add_loss` twice).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss

from tfdist import temporary
from tfdist.collectives import rank_program
from tfdist.losses.batch_part import BatchPart, widened
from tfdist.losses.given_batch import GivenBatch
from tfdist.losses.rank_batch import RankBatch
from tfdist.losses.shares import Shares
from tfdist.losses.sliced_batch import current_sliced_batch, is_on_trial
from tfdist.losses.trainer_step import TrainerStep, trainer_step
from tfdist.placements.eager import EagerFacts
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import How, Partial, Replicate
from tfdist.placements.repair import Repair
from tfdist.placements.telling import is_sum, known_of_loss, without_extremes

_local = threading.local()

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def is_shared() -> bool:
    """Whether losses that are computed here are those of a part of the global batch: a rank's rows, or a slice of them."""
    return _part() is not None


def whole_batch() -> contextlib.AbstractContextManager[None]:
    """A block in which losses are those of a whole batch, also on a rank: of rows that it has gathered."""
    return temporary.attributes(_local, is_whole=True)


def _part() -> BatchPart | None:
    """Returns the part of the global batch whose losses are computed here; None: they are those of the whole."""
    if getattr(_local, "is_whole", False) or is_on_trial():
        return None
    sliced = current_sliced_batch()
    if sliced is not None:
        return sliced
    program = rank_program(peers_on="data")
    return None if program is None else program.attachment(RankBatch)


def _trainer_step() -> TrainerStep | None:
    """Returns the trainer's step in which losses are a rank's own means; None where they are shares."""
    return None if current_sliced_batch() is not None else trainer_step()


def reduce_weighted_values(values: Any, sample_weight: Any, mask: Any, reduction: str, dtype: Any) -> Any:
    """Returns the share of the global mean that this part of the batch has.

    The arguments are those of Keras's function of this name, with one of the reductions `MEANS`. Call it where the batch
    `is_shared`.
    """
    part, step = _part(), _trainer_step()
    values, weights, mask = (
        x if x is None else keras.ops.convert_to_tensor(x, dtype=dtype) for x in (values, sample_weight, mask)
    )
    # For sums Keras takes a mask as weights 0 and 1; for means as 0 and total/valid of the local batch.
    weights = keras_loss.apply_mask(weights, mask, dtype=values.dtype, reduction="sum")
    if weights is not None:
        weights = tf.cast(weights, values.dtype)
        values, weights = keras_loss.squeeze_or_expand_to_same_rank(values, weights)
        values *= weights
    if values.shape.rank == 0:  # see the note: losses that are one number
        if current_sliced_batch() is not None:
            return values
        program = rank_program(peers_on="data")
        placement = Replicate() if program is None else known_of_loss(program, values)
        is_share = is_sum(placement)
        if isinstance(placement, Partial) and placement.is_extreme:
            values = without_extremes(program, values)
        if step is not None:
            return _noted(part.mean_of_share(values) if is_share else values, How.MEAN)
        share = values if is_share else part.weigh(values)
    else:
        is_weighted = reduction == "mean_with_sample_weight" and weights is not None
        values, mask, is_of_all = _of_all_rows(values, mask)
        divisor = part.divisor(values, widened(weights) if is_weighted else None, mask)
        if is_of_all:
            program = rank_program()
            divisor = divisor if is_weighted else divisor / len(program.group_ranks("data"))  # each has counted all rows
            return of_all_rows(tf.cast(tf.math.divide_no_nan(tf.reduce_sum(widened(values)), divisor), values.dtype))
        share = tf.cast(tf.math.divide_no_nan(tf.reduce_sum(widened(values)), divisor), values.dtype)
    if step is not None:
        return _noted(part.mean_of_share(share), How.MEAN)
    if current_sliced_batch() is not None:
        return part.mean_of_share(share)
    program = rank_program(peers_on="data")
    return share if program is None else program.attachment(Shares).add(_noted(share, How.SUM))


def reduce_sum(values: Any) -> Any:
    """Returns what a Keras loss whose reduction is a sum makes of a part's `values`, which it has weighted."""
    total = tf.reduce_sum(values)
    if values.shape.rank != 0 and current_sliced_batch() is not None:
        return _mean_of_sum(total)
    if _trainer_step() is None or values.shape.rank == 0:
        return total
    return _noted(_mean_of_sum(total), How.MEAN)


def of_all_rows(loss: Any) -> Any:
    """Returns what a rank's loss is, where `loss`, one number, was computed of the rows of all ranks, and is the same on all."""
    if _trainer_step() is not None:
        return _noted(loss, How.MEAN)
    program = rank_program(peers_on="data")
    return program.attachment(Shares).add(_noted(_part().weigh(loss), How.SUM))


def average_loss(average: Callable[[Any], Any], per_example_loss: Any, global_batch_size: Any) -> Any:
    """Returns a rank's own mean, where TensorFlow's `average` returns the sum of `per_example_loss` over a batch size.

    `average` is given that size. Without a `global_batch_size` it is the number of the batch's rows.
    """
    if global_batch_size is None:
        return _noted(average(tf.shape(per_example_loss)[0]), How.MEAN)
    return _noted(_mean_of_sum(average(global_batch_size)), How.MEAN)


def _mean_of_sum(total: Any) -> Any:
    """Returns of which own mean `total`, a sum over the part's rows, is the share; rows that several ranks have count once."""
    program = rank_program(peers_on="data")
    copies = 1 if program is None else program.attachment(GivenBatch).copies
    return _part().mean_of_share(total) / tf.cast(copies, total.dtype)


def _of_all_rows(values: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor | None, bool]:
    """Returns `values`, losses, and their mask, or those of the rows of all ranks, which they have gathered since rows meet in
    them; and whether these are it."""
    program = rank_program(peers_on="data")
    is_alone = program is None or program.is_eager or current_sliced_batch() is not None
    here = None if is_alone else program.here()
    if here is None:
        return values, mask, False
    known_of_loss(program, values)
    repair = here.attachment(Repair)
    values = repair.now(values)
    is_of_all = repair.is_agreed(values)
    if is_of_all and mask is not None:
        known_of_loss(program, mask)  # warns of one that is not known
        whole = repair.whole(mask, "loss/mask")
        mask = mask if whole is None else whole
    return values, mask, is_of_all


def _noted(loss: Any, how: How) -> Any:
    """Notes how the ranks' `loss`, which counts what it should, makes up that of the batch, and returns it."""
    program = rank_program()
    if program is not None and program.is_eager and tf.executing_eagerly():
        program.attachment(EagerFacts).declare(loss, Partial(how))
    elif program is not None and tf.is_symbolic_tensor(loss) and (here := program.that_made(loss)) is not None:
        here.attachment(Facts).declare(loss, Partial(how))
    return loss


def is_own_mean() -> bool:
    """Whether losses that are computed here are a rank's own means."""
    return is_shared() and _trainer_step() is not None


def scale_loss(value: Any) -> Any:
    """Returns the share of the step's loss, from a mean over a part of the batch, such as a layer's loss."""
    part = _part()
    if part is None or _trainer_step() is not None:
        return value
    value, program = tf.convert_to_tensor(value), rank_program(peers_on="data")
    is_share = program is not None and program.attachment(Shares).is_share(value)
    return part.weigh_share(value) if is_share else part.weigh(value)


def unscale_loss(value: Any) -> Any:
    """Returns what is logged of a step's loss, of which each rank has its share."""
    part = _part()
    if part is None:
        return value
    value = tf.stop_gradient(tf.convert_to_tensor(value))
    if _trainer_step() is None:
        return part.logged(value)
    # With reduction None a loss has one value per example, and Keras logs their mean.
    return value if value.shape.rank == 0 else tf.math.divide_no_nan(tf.reduce_sum(value), tf.cast(tf.size(value), value.dtype))
