"""What Keras logs of each loss of a model with several outputs.

`CompileLoss` notes a loss in a metric whenever it is called: here, for every microbatch. What is to be noted is the batch's, and
so the microbatches' shares are added up first.

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
    """The metrics of the losses of one batch of `model`."""

    def __init__(self, model: keras.Model):
        self._compile_loss = model._compile_loss
        self._trackers = list(getattr(self._compile_loss, "_metrics", ()))
        self._sums = [_Sum() for _ in self._trackers]
        self._seen: set[int] = set()

    @contextlib.contextmanager
    def collected(self, number: int) -> Iterator[None]:
        """Within it, what the trackers would note of microbatch `number` is added up; nothing when it is computed again."""
        sums = [_Sum() for _ in self._trackers] if number in self._seen else self._sums
        self._seen.add(number)
        with self._replaced(sums):
            yield

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Within it, nothing is noted."""
        with self._replaced([_Sum() for _ in self._trackers]):
            yield

    def update(self, rows: int | None) -> None:
        """Notes the batch's losses, weighted by its `rows`, if they are known, as Keras does."""
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
    """Takes the place of a metric."""

    def __init__(self) -> None:
        self.parts: list[tf.Tensor] = []

    def update_state(self, value: tf.Tensor, sample_weight: Any = None) -> None:
        del sample_weight
        self.parts.append(value)
