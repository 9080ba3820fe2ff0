"""What is told once of losses that a rank cannot compute of its part of a batch."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from typing import Any

import tensorflow as tf

from tfdist import errors, temporary
from tfdist.collectives import RankProgram
from tfdist.losses.given_batch import is_given_everywhere
from tfdist.losses.row_means import COMPARISON, FUNCTION, MEETING, SUM, SUM_OVER_ROWS, RowMeans

_told: weakref.WeakSet[Any] = weakref.WeakSet()
_local = threading.local()

_FIXES = {
    SUM: (
        "Each device has a part of the rows, and its loss counts as the mean over them: divided by a constant, such as the "
        "batch size, or by nothing, the sum is too small by the number of devices.",
        "Take the mean: `tf.reduce_mean`, a Keras loss or `tf.nn.compute_average_loss`. Or, if all losses of the model are such "
        'sums, divided by the global batch size as in a loop around `strategy.run`: make the strategy with `step_losses="sum"`.',
    ),
    SUM_OVER_ROWS: (
        "That loss counts as the sum over the rows of all devices: divided by the rows of one it is too large by their number.",
        'Let Keras divide: `reduction="sum_over_batch_size"`.',
    ),
    FUNCTION: (
        "Each device computes it of its own rows, and the mean over the devices is not what one device computes of all.",
        "Return one value per row and take their mean (a masked mean is a Keras loss with a mask, or with "
        '`reduction="mean_with_sample_weight"` and `sample_weight`); or let every device compute it of all rows: '
        "`tfdist.losses.OverGlobalBatch(loss)`.",
    ),
    COMPARISON: (
        "Each device has a part of the rows, and compares them with its own alone, where one device compares all.",
        "Let the loss have all rows: `tfdist.losses.OverGlobalBatch(loss)`, called with what is compared.",
    ),
    MEETING: (
        "Each device has a part of the rows, and lets them meet its own alone, where on one device all meet.",
        "In a loss, let it have all rows: `tfdist.losses.OverGlobalBatch(loss)`. In a layer or a step, reduce or gather over the "
        'devices: `tfdist.collectives.all_reduce(x, "data")`, `tfdist.collectives.all_gather(x, uneven=True)`.',
    ),
}


def warn_of_step(model: Any, program: RankProgram, loss: tf.Tensor) -> None:
    """Warns, once for `model`, if the `loss` that a step of it differentiates is no mean over rows."""
    if model in _told or is_given_everywhere():
        return
    fault = program.attachment(RowMeans).fault_of(loss)
    if fault is not None:
        _told.add(model)
        why, fix = _FIXES[fault]
        warnings.warn(errors.message(f"The loss of {type(model).__name__} contains {fault}. {why}", fix=fix), stacklevel=2)


def calling(loss: Any) -> contextlib.AbstractContextManager[None]:
    """A block in which `loss`, a Keras loss, is called."""
    return temporary.attributes(_local, loss=loss)


def warn_of_one_number(program: RankProgram, value: tf.Tensor) -> None:
    """Warns, once for the Keras loss that is called, if the one number that it makes of a batch, `value`, is no mean of rows."""
    loss = getattr(_local, "loss", None)
    if loss is None or is_given_everywhere():
        return
    function = getattr(loss, "fn", None) or loss
    if function in _told or program.attachment(RowMeans).fault_of(value) is None:
        return
    _told.add(function)
    name = getattr(function, "__name__", None) or type(function).__name__
    why, fix = _FIXES[FUNCTION]
    warnings.warn(
        errors.message(f"The loss `{name}` returns one number for a batch, which is no mean over its rows. {why}", fix=fix),
        stacklevel=2,
    )
