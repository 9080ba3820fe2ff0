"""Where a tensor lives: the words of the ZeRO table."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Replicate:
    """Every rank holds all of it."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Each rank holds one shard.

    Attributes:
        axis: the tensor axis that is split in equal shards; None splits the flattened tensor, padding the last shard.
        is_padded: whether an axis that cannot be split in equal shards is padded with zeros; else it is refused.
    """

    axis: int | None = None
    is_padded: bool = dataclasses.field(default=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Own:
    """One rank holds all of it, the others nothing.

    Attributes:
        rank: the owner's index along the mesh axis.
    """

    rank: int


@dataclasses.dataclass(frozen=True)
class Partial:
    """Every rank holds a full-size summand; the tensor is their sum, not formed yet."""


Placement = Replicate | Shard | Own | Partial
