"""A rank's batch whose losses are computed slice by slice.

The loss of a slice is its share of the global batch's loss, as the loss of a rank is (see `global_losses`): the weighted sum of
the losses of the slice's examples over the divisor of all slices of all data ranks. Most divisors are counts that follow from the
shapes. A divisor that depends on the data (on a mask, or for `mean_with_sample_weight`) must be known before the gradient of the
first slice is. So the loss function is then called once on every slice, for the divisors alone, with zeros for predictions.

A loss that is no mean over rows (a root, a ratio of sums, rows that meet) is not the sum of what slices have. `is_mean_over_rows`
tells them apart, and such a loss is computed of all slices together.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import RankProgram, all_reduce
from tfdist.collectives.results import Results
from tfdist.losses.batch_part import BatchPart
from tfdist.placements.facts import Facts
from tfdist.placements.graph_facts import GivenFacts, TracedFacts
from tfdist.placements.kinds import How, Partial, Placement, Replicate, Shard
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.repair import Repair
from tfdist.placements.telling import is_sum, warn_of_layer_in_pipeline

_local = threading.local()
# How many of the first rows of what a layer is called on here are the batch's, an int32 scalar; None: all. A slice without rows
# is given one, which what a layer notes of its examples, such as their mean, must leave out.
OWN_ROWS: contextvars.ContextVar[tf.Tensor | None] = contextvars.ContextVar("own_rows", default=None)


class SlicedBatch(BatchPart):
    """The slices of one rank's batch, one of which is the part of the global batch that losses are computed of now.

    `rows` has each slice's number of rows, an integer scalar. `call_on_zeros` calls the loss function on the slice of the number
    that it is given, with zeros for predictions.
    """

    def __init__(self, program: RankProgram | None, rows: list[tf.Tensor], call_on_zeros: Callable[[int], Any]):
        self._program = program if program is not None and program.mesh.size("data") > 1 else None
        self._results = None if program is None else program.part(Results)
        self._rows = [tf.cast(count, tf.float64) for count in rows]
        self._all_rows = self._over_ranks(tf.add_n(self._rows), "loss/rows")
        self._call_on_zeros = call_on_zeros
        self._number: int | None = 0  # None: all of them
        self._num_summands = 0  # how often `_total` was called for this slice
        self._collected: list[list[tf.Tensor]] | None = None
        self._totals: list[tf.Tensor] | None = None

    def slice(self, number: int) -> contextlib.AbstractContextManager[None]:
        """A block in which losses are those of the slice `number`."""
        self._number, self._num_summands = number, 0
        return temporary.attributes(_local, sliced_batch=self)

    @contextlib.contextmanager
    def together(self, given: Any, predictions: Sequence[tf.Tensor]) -> Iterator[None]:
        """A block in which losses are those of all slices together, and of a rank's own means.

        Args:
            given: what the rank was given, rows of the whole batch.
            predictions: what the model has made of these rows. It counts as rows from here on, and what Keras has put on it, too.
        """
        self._number = None
        if self._program is None:
            yield
            return
        here = self._program.here() or self._program
        rows, facts = here.part(RankRows), here.part(Facts)
        known = [facts.of(x) for x in tf.nest.flatten(given) if tf.is_symbolic_tensor(x) and here.exists_here(x)]
        placement = next((one for one in known if isinstance(one, Shard)), Shard())
        for x in predictions:
            for one in (x, *(getattr(x, name) for name in ("_keras_mask", "_keras_logits") if hasattr(x, name))):
                facts.declare(one, placement)
        here.part(Repair).pass_over()
        with rows.those_of(tf.add_n(self._rows), self.fraction()):
            yield

    def fraction(self) -> tf.Tensor:
        rows = tf.add_n(self._rows) if self._number is None else self._rows[self._number]
        return tf.math.divide_no_nan(rows, self._all_rows)

    def of_layer(self, loss: tf.Tensor, given: Sequence[tf.Tensor], owner: Any) -> tf.Tensor:
        """Returns what `loss`, a number that a layer has added, counts in the loss of the global batch.

        Args:
            given: the rows of the slice that the layers have read.
            owner: the model of the layer; what cannot be told of its losses is told once.
        """
        if loss.shape.rank != 0:
            loss = tf.reduce_sum(loss)
        if not tf.is_symbolic_tensor(loss):  # on one device alone, for debugging: what it is of rows nobody knows
            return self.weigh(loss)
        facts = _SliceFacts({x.name: Shard() for x in given}, self._results, {x.shape[0] for x in given if x.shape.rank} - {None})
        placement = facts.of(loss)
        if is_sum(placement):
            return tf.where(self.fraction() > 0, loss, tf.zeros_like(loss))
        if placement not in (Replicate(), Replicate(is_drawn=True), Partial(How.MEAN)):
            warn_of_layer_in_pipeline(owner, placement, loss)
        return self.weigh(loss)

    def totals(self, counts: list[tf.Tensor], sums: list[tf.Tensor]) -> list[tf.Tensor]:
        # Counts are in proportion to the rows.
        in_all = [tf.math.divide_no_nan(count, tf.cast(self.fraction(), count.dtype)) for count in counts]
        return [*in_all, *map(self._total, sums)]

    def _total(self, summand: tf.Tensor) -> tf.Tensor:
        """Returns the sum of `summand`, which depends on the data, over all slices of all ranks."""
        if self._collected is not None:
            self._collected[-1].append(summand)
            return tf.ones_like(summand)
        if self._totals is None:
            self._totals = self._collect()
        self._num_summands += 1
        return tf.cast(self._totals[self._num_summands - 1], summand.dtype)

    def _collect(self) -> list[tf.Tensor]:
        """Calls the loss function on all slices, and returns the sum of each summand that it has asked the total of."""
        number, num_summands = self._number, self._num_summands
        self._collected = []
        # What a loss function assigns for zeros is dropped with the scope.
        with keras.StatelessScope():
            for index in range(len(self._rows)):
                self._number = index
                self._collected.append([])
                self._call_on_zeros(index)
        by_summand = list(zip(*self._collected, strict=True))
        self._number, self._num_summands, self._collected = number, num_summands, None
        sums = tf.stack([tf.add_n([tf.cast(part, tf.float64) for part in parts]) for parts in by_summand])
        return tf.unstack(self._over_ranks(sums, "loss/divisors"), num=len(by_summand))

    def _over_ranks(self, x: tf.Tensor, label: str) -> tf.Tensor:
        return x if self._program is None else all_reduce(x, "data", label=label)


class _SliceFacts(GivenFacts):
    """Those of what is computed of one slice of a batch: what ranks have agreed on is of that slice, too."""

    def _of_collective(self, tensor: tf.Tensor) -> Placement | tf.Tensor | None:
        result = None if self._results is None else self._results.of(tensor)
        return None if result is None else Replicate() if result.like is None else result.like


class _ZeroState(keras.StatelessScope):
    """A block in which variables are zeros, also those that other ranks have."""

    def get_current_value(self, variable: keras.Variable) -> Any:
        return tf.zeros(variable.shape, variable.dtype)


def is_mean_over_rows(loss: Callable[[Any], Any], rows: Any, program: RankProgram | None) -> bool:
    """Whether `loss(rows)` is seen to be what its values for slices are on average, weighted by their rows.

    It is traced once more for that, of `rows`: tensors whose axis 0 is the batch, or their specs. Weights count as numbers that
    all ranks have.
    """

    def spec_of(x: Any) -> Any:
        if isinstance(x, tf.Tensor | tf.TensorSpec):
            return tf.TensorSpec([None, *x.shape[1:]] if x.shape.rank else x.shape, x.dtype)
        return tf.type_spec_from_value(x)

    on_trial = contextlib.nullcontext() if program is None else program.on_trial()
    try:
        with on_trial, _ZeroState(), temporary.attributes(_local, is_trial=True):
            graph = tf.function(loss, autograph=False).get_concrete_function(tf.nest.map_structure(spec_of, rows)).graph
        return TracedFacts(graph).of(graph.outputs[0]) in (Replicate(), Partial(How.MEAN))
    except Exception:  # noqa: BLE001  what cannot be traced here is not known to be one
        return False


def is_on_trial() -> bool:
    """Whether a loss is traced for `is_mean_over_rows`."""
    return getattr(_local, "is_trial", False)


def current_sliced_batch() -> SlicedBatch | None:
    """Returns the batch of whose slices losses are computed here, None where they are computed of whole batches."""
    return getattr(_local, "sliced_batch", None)
