"""What Keras logs of each loss of a model with several outputs.

Keras's `CompileLoss` updates a metric for each loss, its tracker, whenever the loss is called: in a pipeline, for every
microbatch. The tracker should get the loss of the batch, so the microbatches' shares of it are added up first.

`_compile_loss` and its `_metrics` are private to Keras: tests/pipeline/test_private_names_of_pipeline.py fails when they change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.losses.global_losses import unscale_loss


class LossTrackers:
    """The trackers of a model's losses, while the losses of one batch are computed.

    Args:
        model: a compiled model.
    """

    def __init__(self, model: keras.Model):
        self._compile_loss = model._compile_loss
        self._trackers = list(getattr(self._compile_loss, "_metrics", ()))
        self._sums = [_Sum() for _ in self._trackers]
        self._seen: set[int] = set()

    @contextlib.contextmanager
    def collected(self, microbatch: int) -> Iterator[None]:
        """A block in which the losses of a microbatch are added up, and the trackers get none.

        A microbatch whose losses are computed a second time adds nothing.
        """
        sums = [_Sum() for _ in self._trackers] if microbatch in self._seen else self._sums
        self._seen.add(microbatch)
        with self._replaced(sums):
            yield

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """A block in which losses are neither added up nor tracked."""
        with self._replaced([_Sum() for _ in self._trackers]):
            yield

    def update(self, rows: int | None) -> None:
        """Updates the trackers with the batch's losses, weighted by the batch's number of rows, if that is known, as by Keras."""
        for tracker, total in zip(self._trackers, self._sums, strict=True):
            if total.parts:
                tracker.update_state(unscale_loss(tf.add_n(total.parts)), sample_weight=rows)

    @contextlib.contextmanager
    def _replaced(self, stand_ins: list[Any]) -> Iterator[None]:
        if not self._trackers:
            yield
            return
        before = self._compile_loss._metrics
        self._compile_loss._metrics = stand_ins
        try:
            yield
        finally:
            self._compile_loss._metrics = before


class _Sum:
    """Takes the place of a tracker and keeps what the tracker would have got."""

    def __init__(self) -> None:
        self.parts: list[tf.Tensor] = []

    def update_state(self, value: tf.Tensor, sample_weight: Any = None) -> None:
        del sample_weight
        self.parts.append(value)
