"""What an eager rank is handed for the gradients of sharded parameters: the sums over the ranks, whole.

There is no graph that would tell what becomes of a gradient. Where this rank's own summand is wanted, it is found by the sum
itself; what has been computed of a sum is known as such, not what it would be of the summand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram


class EagerSums:
    """The sums that one rank of an eager run has; an attachment of the rank's program."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._known: dict[int, tuple[tf.Tensor, tf.Tensor, tf.Tensor]] = {}  # whole sums, which stay, by id; shards; summands
        self._given: list[tf.Tensor] = []  # summands that collectives were given
        self._same: list[tf.Tensor] = []  # what else is whole, and the same on all ranks
        self._of_rows: list[tf.Tensor] = []  # gradients of rows
        self._is_asking = False
        self._recorder: Any = None  # of what is computed of sums

    def note(self, whole: tf.Tensor, shard: tf.Tensor, summand: tf.Tensor) -> None:
        """Notes that the rank has the sum `whole`, of which it keeps `shard` and to which it has added `summand`."""
        self._known[id(whole)] = (whole, shard, summand)
        self._record(whole)

    def note_same(self, whole: tf.Tensor) -> None:
        """Notes that the rank has `whole`, of which every rank has a shard: the value of an optimizer's slot."""
        if whole.dtype.is_floating:
            self._same.append(whole)
            self._record(whole)

    def note_of_rows(self, grads: Sequence[tf.Tensor]) -> None:
        """Notes `grads`, which a tape has returned for rows of the batch."""
        for grad in grads:
            self._of_rows.append(grad)
            self._record(grad)

    def is_of_rows(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` was computed of gradients of rows."""
        return self._is_computed_of(tensor, self._of_rows)

    def is_of_variables(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` was computed of the whole value of a slot."""
        return self._is_computed_of(tensor, self._same)

    def own(self, values: Any) -> Any:
        """Returns `values`, of which the caller makes sums, with the rank's own summands in the place of sums."""

        def summand(x: Any) -> Any:
            return self._known[id(x)][2] if id(x) in self._known else x

        return tf.nest.map_structure(summand, values) if self._known else values

    def is_of_sums(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` was computed of sums, and is none itself."""
        return id(tensor) not in self._known and self._is_computed_of(tensor, [whole for whole, _, _ in self._known.values()])

    def _record(self, whole: tf.Tensor) -> None:
        if self._recorder is None:
            self._recorder = tf.GradientTape(persistent=True, watch_accessed_variables=False)
            self._recorder.__enter__()
            self._program.at_close.append(self._stop)
        self._recorder.watch(whole)

    def shard_of(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns the rank's shard of the sum `tensor`; None: it is none."""
        return self._known.get(id(tensor), (None, None, None))[1]

    def summand_of(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns what the rank has added to the sum `tensor`; None: it is none, and was not computed of one.

        Raises NotImplementedError for what was computed of a sum.
        """
        if id(tensor) in self._known:
            summand = self._known[id(tensor)][2]
            self._given.append(summand)
            self._recorder.watch(summand)
            return summand
        if self._is_computed_of(tensor, [whole for whole, _, _ in self._known.values()]):
            raise errors.not_implemented(
                "What was computed of a gradient of a sharded parameter is given to a collective in an eager run, where that "
                "gradient is summed already.",
                fix="Put `@tf.function` around `strategy.run`; or give the collective the gradient as it left the tape.",
            )
        return None

    def is_of_collective(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` was computed of what a collective of the program's own has made of summands."""
        return self._is_computed_of(tensor, self._given)

    def _is_computed_of(self, tensor: tf.Tensor, sources: Sequence[tf.Tensor]) -> bool:
        if self._recorder is None or self._is_asking or not sources or not tensor.dtype.is_floating:
            return False
        self._is_asking = True  # on the way back a collective may ask, too
        try:
            with self._recorder.stop_recording():
                return any(found is not None for found in self._recorder.gradient(tensor, list(sources)))
        finally:
            self._is_asking = False

    def _stop(self, outputs: object) -> None:
        del outputs
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self._recorder = None
