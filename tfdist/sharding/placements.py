"""Where a tensor lives: the words of the ZeRO table. `Replicate` and `Partial` mean what they do of every tensor of a step."""

import dataclasses

from tfdist.placements.kinds import Partial, Replicate


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


Placement = Replicate | Shard | Own | Partial
