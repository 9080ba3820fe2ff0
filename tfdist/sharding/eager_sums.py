"""What an eager rank is handed for the gradients of sharded parameters: the sums over the ranks, whole.

There is no graph that would tell what becomes of a gradient. Where this rank's own summand is wanted, it is found by the sum
itself; what has been computed of a sum is known as such (see `placements.eager`), not what it would be of the summand.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram
from tfdist.placements.eager import EagerFacts


class EagerSums:
    """The sums that one rank of an eager run has; an attachment of the rank's program."""

    def __init__(self, program: RankProgram):
        self._facts: EagerFacts = program.attachment(EagerFacts)
        self._known: dict[int, tuple[tf.Tensor, tf.Tensor, tf.Tensor]] = {}  # whole sums, which stay, by id; shards; summands

    def note(self, whole: tf.Tensor, shard: tf.Tensor, summand: tf.Tensor) -> None:
        """Notes that the rank has the sum `whole`, of which it keeps `shard` and to which it has added `summand`."""
        self._known[id(whole)] = (whole, shard, summand)

    def own(self, values: Any) -> Any:
        """Returns `values`, of which the caller makes sums, with the rank's own summands in the place of sums."""

        def summand(x: Any) -> Any:
            return self._known[id(x)][2] if id(x) in self._known else x

        return tf.nest.map_structure(summand, values) if self._known else values

    def is_of_sums(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` was computed of sums, and is none itself."""
        return id(tensor) not in self._known and self._facts.is_of_gradients(tensor)

    def shard_of(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns the rank's shard of the sum `tensor`; None: it is none."""
        return self._known.get(id(tensor), (None, None, None))[1]

    def summand_of(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns what the rank has added to the sum `tensor`; None: it is none, and was not computed of one.

        Raises NotImplementedError for what was computed of a sum.
        """
        if self.is_of_sums(tensor):
            raise errors.not_implemented(
                "What was computed of a gradient of a sharded parameter is given to a collective in an eager run, where that "
                "gradient is summed already.",
                fix="Put `@tf.function` around `strategy.run`; or give the collective the gradient as it left the tape.",
            )
        return self._known.get(id(tensor), (None, None, None))[2]
