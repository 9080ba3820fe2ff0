"""The results of a rank's collectives, by whichever transport: how each depends on the ranks' values.

    gathered or reduced over the data ranks     the same on all: no rank's own rows
    reduced over the tensor ranks               like what each of them gave, row by row: of the rank's own rows
    the rest                                    computed of what the rank gave

What carries a collective tells none of this: an operation of TensorFlow knows no mesh, and what a worker reads from memory that
it shares has no input but a shape.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfdist.collectives.emission import Emission
from tfdist.collectives.parts import Part
from tfdist.collectives.plan import Ranks


class Result(NamedTuple):
    """How what a collective has returned depends on what ranks have.

    Attributes:
        is_of_all: whether it is what all data ranks have gathered, reduced or exchanged: of no rank's own rows.
        is_same: whether ranks with other rows have the same.
        like: what it was made of, row by row, by each of the ranks; None: it was not.
    """

    is_of_all: bool
    is_same: bool
    like: tf.Tensor | None


class Results(Part):
    """The results of the collectives of one rank in one trace. A part of its state.

    Attributes:
        tell: called with those of an eager run: whether all ranks have the same, and what it is like row by row, if anything.
    """

    def __init__(self, program: Emission):
        self.over_data = set(program.group_ranks("shard"))
        self.noted: dict[tuple[int, str], Result] = {}
        self.tell: Callable[[tf.Tensor, bool, tf.Tensor | None], None] | None = None

    def of(self, tensor: tf.Tensor) -> Result | None:
        """Returns what is noted of `tensor`, of the graph of the step or of a branch; None: no collective has returned it."""
        return self.noted.get((id(tensor.graph), tensor.name))


def noted(
    program: Emission,
    found: tf.Tensor,
    ranks: Ranks,
    given: tf.Tensor | None,
    *,
    is_like: bool = False,
    is_same: bool = True,
) -> tf.Tensor:
    """Returns `found`, what a collective has returned to `ranks`, and notes that.

    Args:
        given: what this rank gave; None: nothing.
        is_like: whether each row of `found` is of that row of what each of `ranks` gave.
        is_same: whether all of `ranks` get `found`.
    """
    results = program.part(Results)
    is_of_all = results.over_data <= set(ranks)
    is_same = is_same and is_of_all
    if tf.is_symbolic_tensor(found):
        like = given if is_like and tf.is_symbolic_tensor(given) else None
        results.noted[id(found.graph), found.name] = Result(is_of_all, is_same, like)
    elif results.tell is not None and (is_of_all or is_like):
        results.tell(found, is_same, None if is_of_all else given)
    return found
