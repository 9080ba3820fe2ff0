"""Which gradients are reduced already: from the tensor that the user's code has to the rank's part of the sum.

An optimizer takes what has been summed as it is, and does not sum it again. An eager rank is handed the gradients of sharded
parameters as sums, whole. There is no graph that would tell what becomes of them: where this rank's own summand is wanted, it is
found by the sum itself; what has been computed of a sum is known as such (see `placements.eager`), not what it would be of the
summand.
"""

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import Part, RankProgram
from tfdist.collectives.where import is_visible
from tfdist.placements.eager import EagerFacts


@dataclasses.dataclass(frozen=True)
class _Sum:
    gradient: Any  # kept, so that its id stays its own
    part: tf.Tensor
    summand: tf.Tensor | None = None
    is_returned: bool = False


class KnownSums(Part):
    """The sums that one rank has in one trace, or eager run. A part of its state."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._known: dict[int, _Sum] = {}

    def note(self, gradient: Any, part: tf.Tensor, summand: tf.Tensor | None = None, *, is_returned: bool = False) -> None:
        """Notes that the rank keeps `part`, a flat shard (L,) or all, of the sum of `gradient`, as it left the tape.

        What is kept is known, too: it may be given to `Optimizer.apply` in the place of the gradient. Where `gradient` is the
        sum, which the user's code has, `summand` is what the rank has added to it; `is_returned`: that code is given the part.
        """
        self._known.update({id(part): _Sum(part, part), id(gradient): _Sum(gradient, part, summand, is_returned)})

    def part_of(self, gradient: Any) -> tf.Tensor | None:
        """Returns what the rank keeps of the sum of `gradient`; None: it is not summed, or in another branch only."""
        known = self._known.get(id(gradient))
        return known.part if known is not None and is_visible(known.part) else None

    def is_returned(self, gradient: Any) -> bool:
        """Whether `gradient` is what the rank keeps of a sum, and the user's code was given it."""
        return id(gradient) in self._known and self._known[id(gradient)].is_returned

    # What an eager rank has been handed

    def own(self, values: Any) -> Any:
        """Returns `values`, of which the caller makes sums, with the rank's own summands in the place of sums."""
        return tf.nest.map_structure(lambda x: x if (summand := self._added(x)) is None else summand, values)

    def is_of_sums(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` was computed of sums, and is none itself."""
        return self._added(tensor) is None and self._program.part(EagerFacts).is_of_gradients(tensor)

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
        return self._added(tensor)

    def _added(self, tensor: Any) -> tf.Tensor | None:
        return self._known[id(tensor)].summand if id(tensor) in self._known else None
