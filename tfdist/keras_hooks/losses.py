"""Losses: a rank's loss is its share of the mean over the global batch, instead of the mean over its own part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.keras_hooks.table import replaces
from tfdist.losses.global_losses import MEANS, is_shared, reduce_weighted_values, scale_loss, unscale_loss

_MODULE = "keras.src.losses.loss"


@replaces(_MODULE, "reduce_weighted_values")
def _reduce_weighted_values(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """Keras takes a mean of the ranks' means, which is not the mean of the batch when its parts differ in size or weight."""
    if reduction not in MEANS or not is_shared():
        reduced = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        # The sum over a rank without rows: Keras returns values of shape (0,) as they are, which is no number.
        return tf.reduce_sum(reduced) if reduction == "sum" and is_shared() else reduced
    return reduce_weighted_values(values, sample_weight, mask, reduction, dtype)


@replaces(_MODULE, "scale_loss_for_distribution")
def _scale_loss(original: Callable[..., Any], value: Any) -> Any:
    """Keras divides every loss by the number of ranks, also one that is a share already."""
    return scale_loss(value) if is_shared() else original(value)


@replaces(_MODULE, "unscale_loss_for_distribution")
def _unscale_loss(original: Callable[..., Any], value: Any) -> Any:
    """Keras logs a rank's loss times the number of ranks; what is wanted is the sum of the ranks' shares."""
    return unscale_loss(value) if is_shared() else original(value)
