"""Whole-variable ownership: for optimizers that look at a whole tensor (Adafactor, Lamb, Muon, and all that are unknown).

Flat shards would change what such an optimizer computes. So each variable's slots live whole on one data rank, its owner, which
alone takes the step and then sends the result to the others of its sharding group:

    variables      a (6)   b (5)   c (4)   d (1)         owners, balanced by bytes:  a -> 0   b -> 1   c -> 1   d -> 0
    rank 0         slots of a and d
    rank 1         slots of b and c
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any

from tfdist.optimizers.support import is_elementwise, is_wrapper
from tfdist.optimizers.target import variable_of
from tfdist.sharding import MeshConfig, Shard

_owners: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def balanced_owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Returns an owner for each of `sizes`: the largest first, each to the rank that has least, the lowest of several.

    The fullest rank has at most `sum(sizes) / num_ranks + max(sizes)` (Graham 1969).
    """
    loads = [0] * num_ranks
    owners = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


def assign_owners(optimizer: Any, variables: Sequence[Any], config: MeshConfig) -> None:
    """Gives an owner to each variable that `optimizer` can only step on whole, and that no rank would hold whole otherwise: slots
    that `optimizer` makes for it live there."""
    if is_elementwise(optimizer) or is_wrapper(optimizer):
        return
    if not isinstance(config.placements.optimizer_state, Shard):
        # Ranks that hold a variable whole may step on it; what is sharded over the tensor axis needs an owner to be whole.
        variables = [v for v in variables if variable_of(v).layout.is_tensor_sharded]
    sizes = [math.prod(variable.shape) * variable_of(variable).dtype.size for variable in variables]
    owners = balanced_owners(sizes, config.mesh.num_shards)
    _owners[optimizer] = {variable_of(variable)._unique_id: owner for variable, owner in zip(variables, owners, strict=True)}


def owner_of(optimizer: Any, variable: Any) -> int | None:
    """Returns the place in its sharding group of the rank that owns `variable`'s slots in `optimizer`, any object or None.

    None: nobody owns them whole.
    """
    owners = {} if optimizer is None else _owners.get(optimizer, {})
    return owners.get(variable_of(variable)._unique_id)
