"""What Keras logs of each loss of a model with several outputs.

Keras's `CompileLoss` updates a metric for each loss, its tracker, whenever the loss is called: in a pipeline, for every
microbatch. The tracker should get the loss of the batch, so the microbatches' shares of it are added up first.

`_compile_loss` and its `_metrics` are private to Keras: tests/pipeline/test_private_names_of_pipeline.py fails when they change.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import temporary
from tfdist.losses.global_losses import unscale_loss


class LossTrackers:
    """The trackers of a compiled model's losses, while the losses of one batch are computed."""

    def __init__(self, model: keras.Model, weigh: Callable[[tf.Tensor], tf.Tensor]):
        self._weigh = weigh  # makes a microbatch's share of its mean
        self._compile_loss = model._compile_loss
        self._trackers = list(getattr(self._compile_loss, "_metrics", ()))
        self._losses: dict[int, list[_Losses]] = {}  # by microbatch

    @contextlib.contextmanager
    def withheld(self, microbatch: int | None) -> Iterator[None]:
        """A block in which the trackers get no loss: its losses are kept as those of a microbatch (None: dropped)."""
        stand_ins = [_Losses(self._weigh) for _ in self._trackers]
        with temporary.attributes(self._compile_loss, _metrics=stand_ins) if stand_ins else contextlib.nullcontext():
            yield
        if microbatch is not None:
            self._losses.setdefault(microbatch, stand_ins)

    def update(self, rows: int | None) -> None:
        """Updates the trackers with the batch's losses, weighted by the batch's number of rows, if that is known, as by Keras."""
        for tracker, *parts in zip(self._trackers, *self._losses.values(), strict=True):
            shares = [share for part in parts for share in part.values]
            if shares:
                tracker.update_state(unscale_loss(tf.add_n(shares)), sample_weight=rows)


class _Losses:
    """Takes the place of a tracker. It is no list, which Keras would take for no tracker while it is empty."""

    def __init__(self, weigh: Callable[[tf.Tensor], tf.Tensor]) -> None:
        self.values: list[tf.Tensor] = []
        self._weigh = weigh

    def update_state(self, value: tf.Tensor, sample_weight: Any = None) -> None:
        del sample_weight
        self.values.append(self._weigh(value))
