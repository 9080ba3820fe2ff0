"""Losses of a batch that is fed in microbatches.

A loss of microbatch i is its share of the whole batch's loss, as a rank's is (see `global_losses`): the weighted sum S_i of its
examples' losses over the divisor of all microbatches of all data ranks. Most divisors are counts that follow from the
shapes. Those that look at the data (masks, `mean_with_sample_weight`) must be known before the first microbatch's gradient
is: the loss function is then called once on every microbatch, for the divisors alone, on predictions of zeros.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import RankProgram, all_reduce

_local = threading.local()


class MicrobatchLosses:
    """What the loss functions of one batch on one rank divide by.

    Args:
        program: the rank's program; None: one device has it all.
        rows: rows of each microbatch, int64 scalars.
        call_on_zeros: calls the loss function on microbatch i, with zeros for predictions.
    """

    def __init__(self, program: RankProgram | None, rows: list[tf.Tensor], call_on_zeros: Callable[[int], Any]):
        self._program = program if program is not None and program.mesh.size("data") > 1 else None
        self._rows = [tf.cast(count, tf.float64) for count in rows]
        self._all_rows = self._over_ranks(tf.add_n(self._rows), "loss/rows")
        self._call_on_zeros = call_on_zeros
        self._number = 0
        self._sites = 0
        self._collected: list[list[tf.Tensor]] | None = None
        self._totals: list[tf.Tensor] | None = None

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Within it, losses are those of microbatch `number`."""
        before = getattr(_local, "losses", None)
        self._number, self._sites, _local.losses = number, 0, self
        try:
            yield
        finally:
            _local.losses = before

    def share(self) -> tf.Tensor:
        """Returns the microbatch's rows over those of all microbatches of all ranks, a float64 scalar."""
        return tf.math.divide_no_nan(self._rows[self._number], self._all_rows)

    def weigh(self, mean: tf.Tensor) -> tf.Tensor:
        """Returns the microbatch's part of a mean over the global batch, from the `mean` over its own rows; 0 without rows."""
        share = tf.cast(self.share(), mean.dtype)
        return share * tf.where(share > 0, mean, tf.zeros_like(mean))

    def total_count(self, count: tf.Tensor) -> tf.Tensor:
        """Returns how many there are in all, from a `count` that is in proportion to the rows."""
        return tf.math.divide_no_nan(count, tf.cast(self.share(), count.dtype))

    def total(self, summand: tf.Tensor) -> tf.Tensor:
        """Returns the sum of `summand`, which depends on the data, over all microbatches of all ranks."""
        if self._collected is not None:
            self._collected[-1].append(summand)
            return tf.ones_like(summand)
        if self._totals is None:
            self._totals = self._collect()
        self._sites += 1
        return tf.cast(self._totals[self._sites - 1], summand.dtype)

    def _collect(self) -> list[tf.Tensor]:
        number, sites = self._number, self._sites
        self._collected = []
        # What a loss function assigns for zeros is dropped with the scope.
        with keras.StatelessScope():
            for index in range(len(self._rows)):
                self._number = index
                self._collected.append([])
                self._call_on_zeros(index)
        by_site = list(zip(*self._collected, strict=True))
        self._number, self._sites, self._collected = number, sites, None
        sums = tf.stack([tf.add_n([tf.cast(part, tf.float64) for part in parts]) for parts in by_site])
        return tf.unstack(self._over_ranks(sums, "loss/divisors"), num=len(by_site))

    def _over_ranks(self, x: tf.Tensor, label: str) -> tf.Tensor:
        return x if self._program is None else all_reduce(x, "data", label=label)


def current_losses() -> MicrobatchLosses | None:
    """Returns the losses of the microbatch that is being computed here, None outside a microbatch."""
    return getattr(_local, "losses", None)
