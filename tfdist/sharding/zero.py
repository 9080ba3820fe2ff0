"""The ZeRO stages as a table of placements over the data axis (Rajbhandari et al. 2020).

A stage is data, not a code path. The layout of each variable follows from it (`placement_request`, `MeshConfig.slot_layout`), and
gathers ask that; the plan of an optimizer's step asks the stage, too.
"""

import dataclasses

from tfdist import errors
from tfdist.sharding.placements import Partial, Placement, Replicate, Shard


@dataclasses.dataclass(frozen=True)
class ZeroPlacements:
    """Where a stage keeps its three kinds of model state, over the data axis.

    `gradient` is where a gradient rests between the backward pass and the optimizer step:

    * `Replicate()`: summed and full on every rank (all-reduce);
    * `Partial()`: this rank's own summand, full size, until the step reduce-scatters it;
    * `Shard()`: summed, this rank's part only (reduce-scatter).
    """

    parameter: Placement
    gradient: Placement
    optimizer_state: Placement

    def fraction(self, kind: str, data_parallel_size: int) -> float:
        """Returns the part of the full tensor that one rank holds, `kind` being a field's name."""
        return 1 / data_parallel_size if isinstance(getattr(self, kind), Shard) else 1.0

    def bytes_per_parameter(self, data_parallel_size: int) -> float:
        """Returns bytes of model state per parameter and rank, without padding, of Adam in float32."""
        sizes = {"parameter": 4, "gradient": 4, "optimizer_state": 8}
        return sum(size * self.fraction(kind, data_parallel_size) for kind, size in sizes.items())


ZERO_STAGES = {
    0: ZeroPlacements(Replicate(), Replicate(), Replicate()),
    1: ZeroPlacements(Replicate(), Partial(), Shard()),
    2: ZeroPlacements(Replicate(), Shard(), Shard()),
    3: ZeroPlacements(Shard(), Shard(), Shard()),
}


def placements_of(zero_stage: int) -> ZeroPlacements:
    """Returns the placements of `zero_stage`. Raises ValueError when it is not 0, 1, 2 or 3."""
    if isinstance(zero_stage, bool) or zero_stage not in ZERO_STAGES:
        raise errors.value_error(
            "`zero_stage` must be 0 (nothing sharded), 1 (optimizer state), 2 (and gradients) or 3 (and parameters).",
            zero_stage=zero_stage,
        )
    return ZERO_STAGES[zero_stage]
