"""What the collectives of a rank's trace have returned, by whichever transport: how it depends on what ranks have."""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives.plan import Ranks
from tfdist.collectives.program import RankProgram


class Results:
    """The results of the collectives of one rank in one trace; an attachment of its program."""

    IS_OF_BRANCH = True  # names are of one graph

    def __init__(self, program: RankProgram):
        self._over_data = set(program.group_ranks("shard"))
        self._same: set[str] = set()
        self._like: dict[str, tf.Tensor] = {}

    def note(self, found: tf.Tensor, ranks: Ranks, like: tf.Tensor | None = None) -> None:
        """Notes that all `ranks` get `found`, of which each row is of that row of `like` on each of them."""
        if self._over_data <= set(ranks):
            self._same.add(found.name)
        elif like is not None:
            self._like[found.name] = like

    def is_same(self, tensor: tf.Tensor) -> bool:
        """Whether ranks with other rows have the same `tensor`."""
        return tensor.name in self._same

    def like(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns what `tensor` was made of by ranks that have the same rows, row by row; None: it was not."""
        return self._like.get(tensor.name)


def noted(program: RankProgram, found: tf.Tensor, ranks: Ranks, like: tf.Tensor | None = None) -> tf.Tensor:
    """Returns `found`, what a collective has returned to `ranks`; of a traced one that is noted."""
    if tf.is_symbolic_tensor(found):
        program.attachment(Results).note(found, ranks, like)
    return found
