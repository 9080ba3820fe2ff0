"""How the ranks' values of a tensor together are the value that one device would have, over the data ranks of one step.

    Replicate()             t_r = t                  weights, constants, what collectives over the data ranks have returned
    Shard(axis)             concat_r t_r = t         rows of the batch, and along which axis they lie
    Partial(How.SUM)        sum_r t_r = t            a sum over rows
    Partial(How.MEAN)       sum_r w_r t_r = t        a mean over rows; w_r is the rank's rows over those of all ranks
    Partial(How.MAX)        max_r t_r = t            a maximum over rows; How.MIN: a minimum
    Lengths(axis)           the shape of a tensor whose rows lie along `axis`, a vector of integers
    Places()                numbers of rows among the rank's own, in increasing order
    Unknown(why)            none of these, or not known

With one data rank every tensor is `Replicate`. A rank without rows has a weight of 0, what it has for a mean of none is NaN, and
for a sum over none 0, or NaN where that was computed of a mean: it adds nothing to any whole.
"""

import dataclasses
import enum
from typing import TypeAlias


class How(enum.Enum):
    """How the values of the ranks, each of its own rows, make up that of all rows. The first three are sums."""

    SUM = "a sum over rows"
    COUNT = "the number of the rank's rows, times a constant that is the same on all ranks"
    SHARE = "the rank's weight times a value that is the same on all ranks"
    MEAN = "a mean over rows"
    MAX = "a maximum over rows"
    MIN = "a minimum over rows"
    ALIKE = "the same on all ranks that have rows"
    REPLICAS = "the number of replicas, which is 1 on one device"


class Why(enum.Enum):
    """Why the placement of a tensor is not known; in words that a warning puts after "contains"."""

    NO_RULE = "the result of an operation that tfdist does not know"
    FUNCTION = "a function of the whole batch that is no mean over its rows"
    MIXED = "a sum over rows that something else is added to"
    GOES_BACK = "a number of all rows that goes back to each"
    SOME_ROWS = "a mean over some of the rows"
    MEET = "rows that meet other rows of the batch (another order, a part, all pairs, a number of each)"
    SIZE = "a size that depends on all rows"
    OWN_ROWS = "a sum over rows that is divided by a number which is that of the device's own rows, or happens to be the same"
    GIVEN = "what the step is given beside rows"


@dataclasses.dataclass(frozen=True)
class Replicate:
    """The same on all ranks.

    Attributes:
        is_drawn: it is of random numbers that each rank has drawn for itself: not the same numbers, but of no row of the batch.
    """

    is_drawn: bool = False


@dataclasses.dataclass(frozen=True)
class _OfRows:
    """What `Shard` and `Lengths` say of rows.

    Attributes:
        axis: along which the rows lie, 0 or more. Of a list of tensors (a `TensorList`): of each of its elements.
        rows: the names of the tensors of the batch whose rows these are; () where it is not known which. Several names: parts
            that stand one after the other on every rank, so that the order of rows is not that of one device, but their set is.
        is_even: whether each row of the batch has as many here as every other, so that a rank's part of them is its weight.
        pieces: how many here each row of `rows` has become, one after the other; None: it is not known, or differs.
    """

    axis: int = 0
    rows: tuple[str, ...] = ()
    is_even: bool = True
    pieces: int | None = 1


class Shard(_OfRows):
    """Rows: the ranks' values, one after the other along `axis`, are that of one device."""

    @property
    def is_joined(self) -> bool:
        """Whether the order of rows is not that of one device."""
        return len(self.rows) > 1


@dataclasses.dataclass(frozen=True)
class Partial:
    """A number, or a tensor of numbers, of all rows, of which each rank has that of its own.

    Attributes:
        how: how the ranks' values make up the whole.
        rows: of a COUNT that is exactly the number of rows of a tensor: the names of these, as in `Shard`. Of a vector of several
            such numbers: the name of each.
    """

    how: How = How.SUM
    rows: tuple[str, ...] = ()

    @property
    def is_sum(self) -> bool:
        """Whether the ranks' values add up to the whole."""
        return self.how in (How.SUM, How.COUNT, How.SHARE)

    @property
    def is_extreme(self) -> bool:
        """Whether the whole is no sum of the ranks' values, weighted or not."""
        return self.how in (How.MAX, How.MIN, How.REPLICAS)


class Lengths(_OfRows):
    """The shape of a tensor of rows, or a vector like it: element `axis` is the number of rows, the others the same on all ranks.

    If it is even, the number is a COUNT, else a SUM.
    """


@dataclasses.dataclass(frozen=True)
class Places:
    """Numbers of rows among the rank's own (`tf.range(tf.shape(x)[0])`, `tf.where(mask)`), of rank 1, or in the first column.

    What is looked up by them among the rank's rows are rows. What stands in other columns, and is looked up within the row that
    the first one names, is of the rows.

    Attributes:
        are_all: whether every row is there, once; else some are, as many as the numbers say.
        rows, pieces: as in `Shard`, of all those that are numbered.
    """

    are_all: bool = True
    rows: tuple[str, ...] = ()
    pieces: int | None = 1


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Not known, or none of the others.

    Attributes:
        why: the kind of reason.
        what: the operation that is the reason, its type and its name.
    """

    why: Why
    what: str = ""


Placement: TypeAlias = Replicate | Shard | Partial | Lengths | Places | Unknown
