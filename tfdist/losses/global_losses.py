"""Losses inside `strategy.run`: a rank's share of the mean over the global batch, or its own mean.

Rank r has the weighted sum S_r of its examples' losses and a divisor D_r: how many losses there are (valid ones, under a mask),
or what their weights sum to. N ranks:

    Keras under tf.distribute      sum_r S_r / D_r / N          a mean of means
    one device, and tfdist         sum_r S_r / sum_s D_s        the mean of the global batch

The two differ as soon as the D_r do: in a last partial batch, with masks or with weights. Here the loss of rank r is its share,
S_r / sum_s D_s: shares, and so their gradients, add up to those of the global batch, and a rank without examples has share 0.
In a step of Keras's trainer it is the rank's own mean l_r, of which w_r l_r is the share (see `trainer_step`).

                              shares                                           own means
    reduce_weighted_values    instead of the scaled local mean. One            the same; the first one counts the rows of all
                              all-reduce of 1 number, of 3 with a mask         ranks, too, in 1 number more
    scale_loss                `add_loss` and regularizers: weighted by rows.   they stay as they are
                              One all-reduce of 1 number a step
    unscale_loss              what is logged: the sum of the shares. One       the own mean, which trackers weigh by rows
                              all-reduce of 1 number, of 2 for the
                              reduction None

A rank's batch may also be fed in slices (see `sliced_batch`): then a loss is the slice's own mean, and who feeds it weighs the
sum of what a slice's loss consists of by `SlicedBatch.weigh`. A loss in a loop inside `strategy.run` (`tf.map_fn`) raises, as
every collective does there.

Note: losses that are one number. A loss that returns a scalar has averaged its rank's batch itself (a function that ends in
`tf.reduce_mean`; `Dice` and `Tversky` without `axis`; `MeanSquaredError` of vectors). Keras does not scale such a loss, so that N
ranks would train N times as fast as one; it divides `add_loss` and `activity_regularizer` by N. Here each of these losses is
weighted by the rank's part of the batch's rows, if it is a mean over rows, or, as a weight's regularizer, has nothing to do with
rows. A sum over rows, such as what `add_loss` gets from a Keras loss, is a share already (a sum of a share and of a mean, in one
call, is taken for a share: call `add_loss` twice). Of any other (`Dice`, a ratio of sums) the ranks agree on the numbers that it
needs first (see `placements.repair`).
"""

import contextlib
import threading
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss

from tfdist import temporary
from tfdist.collectives import rank_program
from tfdist.losses.batch_part import BatchPart, RankBatch
from tfdist.losses.sliced_batch import current_sliced_batch, is_on_trial
from tfdist.losses.trainer_step import trainer_step
from tfdist.losses.undivided_batch import GivenBatch
from tfdist.placements.eager import EagerFacts
from tfdist.placements.facts import Facts, has_rows_of_branch
from tfdist.placements.kinds import How, Partial, Placement, Replicate
from tfdist.placements.repair import Repair
from tfdist.placements.telling import as_whole, is_sum, known, known_of_loss, without_extremes
from tfdist.placements.totals import wide
from tfdist.sharding.gradient_weight import GradientWeight

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
    return None if program is None else program.part(RankBatch)


def _are_own_means() -> bool:
    """Whether losses that are computed here are the part's own means; else they are its shares."""
    return current_sliced_batch() is not None or trainer_step() is not None


def reduce_weighted_values(values: Any, sample_weight: Any, mask: Any, reduction: str, dtype: Any) -> Any:
    """Returns the share of the global mean that this part of the batch has.

    The arguments are those of Keras's function of this name, with one of the reductions `MEANS`. Call it where the batch
    `is_shared`.
    """
    values, weights, mask = (
        x if x is None else keras.ops.convert_to_tensor(x, dtype=dtype) for x in (values, sample_weight, mask)
    )
    # For sums Keras takes a mask as weights 0 and 1; for means as 0 and total/valid of the local batch.
    weights = keras_loss.apply_mask(weights, mask, dtype=values.dtype, reduction="sum")
    if weights is not None:
        weights = tf.cast(weights, values.dtype)
        values, weights = keras_loss.squeeze_or_expand_to_same_rank(values, weights)
        values *= weights
    if values.shape.rank == 0:
        return _of_function(values)
    if weights is None and is_own_mean() and has_rows_of_branch(values):  # the way back out of a branch sends nothing
        values = wide(values)
        return of_all_rows(tf.cast(tf.math.divide_no_nan(tf.reduce_sum(values), tf.cast(tf.size(values), values.dtype)), dtype))
    is_weighted = reduction == "mean_with_sample_weight" and weights is not None
    values, mask, is_of_all = _of_all_rows(values, mask)
    divisor = _part().divisor(values, wide(weights) if is_weighted else None, mask)
    if is_of_all and not is_weighted:
        divisor /= len(rank_program().group_ranks("data"))  # each has counted all rows
    loss = tf.cast(tf.math.divide_no_nan(tf.reduce_sum(wide(values)), divisor), values.dtype)
    return of_all_rows(loss) if is_of_all else _of_share(loss)


def reduce_sum(values: Any) -> Any:
    """Returns what a Keras loss whose reduction is a sum makes of a part's `values`, which it has weighted."""
    if values.shape.rank == 0:
        return _of_function(values)
    values, _, is_of_all = _of_all_rows(values, None)
    total = tf.reduce_sum(values)
    return of_all_rows(total) if is_of_all else _of_sum(total) if _are_own_means() else total


def _of_function(value: tf.Tensor) -> Any:
    """Returns what a part's loss is, where a loss function makes one number of it."""
    if current_sliced_batch() is not None:
        return value
    rank_program().part(GradientWeight).has_numbers = True
    return _of_number(value, known_of_loss(rank_program(), value))


def of_all_rows(loss: Any) -> Any:
    """Returns what a part's loss is, where `loss`, one number, is a mean over its rows, or the same on all ranks."""
    return _noted(loss, How.MEAN) if _are_own_means() else _noted(_part().weigh(loss), How.SUM)


def _of_share(share: tf.Tensor) -> tf.Tensor:
    """Returns what a part's loss is, of the global batch's loss of which the part has `share`."""
    return _noted(_part().mean_of_share(share), How.MEAN) if _are_own_means() else _noted(share, How.SUM)


def _of_number(value: tf.Tensor, placement: Placement) -> tf.Tensor:
    """Returns what a rank's loss is, where `value` is one number, of that placement: see the note."""
    if isinstance(placement, Partial) and placement.is_extreme:
        value = without_extremes(rank_program(), value)
    return _of_share(value) if is_sum(placement) else of_all_rows(value)


def own_mean(average: Any, *, is_over_batch: bool) -> Any:
    """Returns a rank's own mean, from an `average` of its rows: their sum over the number of the batch's rows, or of its own."""
    return _of_sum(average) if is_over_batch else _noted(average, How.MEAN)


def _of_sum(total: Any) -> Any:
    """Returns of which own mean `total`, a sum over the part's rows, is the share; rows that several ranks have count once."""
    program = rank_program(peers_on="data")
    copies = 1 if program is None else program.part(GivenBatch).copies
    return _noted(_part().mean_of_share(total) / tf.cast(copies, total.dtype), How.MEAN)


def _of_all_rows(values: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor | None, bool]:
    """Returns `values`, losses, and their mask, or those of all ranks, where rows meet in them or they are numbers of all rows;
    and whether these are it."""
    program = rank_program(peers_on="data")
    here = None if program is None or current_sliced_batch() is not None else program.here()
    if here is None:
        return values, mask, False
    known_of_loss(program, values)
    values = as_whole(program, values, "loss")
    if here.is_eager:
        facts = here.part(EagerFacts)
        return values, mask, isinstance(facts.of(values), Replicate) and facts.counts_once(values)
    repair = here.part(Repair)
    is_of_all = repair.is_agreed(values)
    if is_of_all and mask is not None:
        known_of_loss(program, mask)  # warns of one that is not known
        whole = repair.whole(mask, "loss/mask")
        mask = mask if whole is None else whole
    return values, mask, is_of_all


def _noted(loss: Any, how: How) -> Any:
    """Notes how the ranks' `loss`, which counts what it should, makes up that of the batch, and returns it."""
    program = None if current_sliced_batch() is not None else rank_program()
    if program is not None and program.is_eager and tf.executing_eagerly():
        program.part(EagerFacts).declare(loss, Partial(how))
    elif program is not None and tf.is_symbolic_tensor(loss) and (here := program.that_made(loss)) is not None:
        here.part(Facts).declare(loss, Partial(how))
    return loss


def is_own_mean() -> bool:
    """Whether losses that are computed here are a rank's own means."""
    return is_shared() and current_sliced_batch() is None and trainer_step() is not None


def scale_loss(value: Any) -> Any:
    """Returns the share of the step's loss, from a mean over a part of the batch, such as a layer's loss."""
    if not isinstance(_part(), RankBatch) or is_own_mean():
        return value
    value, program = tf.convert_to_tensor(value), rank_program(peers_on="data")
    return _of_number(value, known(program, value, "loss", tf.distribute.get_strategy(), "A loss that a layer adds"))


def unscale_loss(value: Any) -> Any:
    """Returns what is logged of a step's loss, of which each rank has its share. Shares of slices are added up first."""
    part = _part()
    if part is None:
        return value
    value = tf.stop_gradient(tf.convert_to_tensor(value))
    if isinstance(part, RankBatch) and not _are_own_means():
        return part.logged(value)
    # With reduction None a loss has one value per example, and Keras logs their mean.
    return value if value.shape.rank == 0 else tf.math.divide_no_nan(tf.reduce_sum(value), tf.cast(tf.size(value), value.dtype))
