"""Ranks' parts of each weight of a model under a plan."""

import dataclasses
import functools
import math

from tfdist.collectives import assign_buckets
from tfdist.sharding import ShardingConfig
from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.traced_model import TracedModel, Weight


@dataclasses.dataclass(frozen=True)
class Part:
    """One rank's part of a weight.

    Attributes:
        weight: the weight.
        place: of what is trained its place in `traced.trained`; None: it is not.
        local: elements, sharded over the tensor axis.
        shard: elements of one flat shard of these over the replicas, padding included.
    """

    weight: Weight
    place: int | None
    local: int
    shard: int

    @property
    def bytes(self) -> int:
        """Bytes of what a rank computes with: whole, but for the tensor axis."""
        return self.stored(False)

    def stored(self, is_sharded: bool) -> int:
        """Returns the bytes of what a rank stores: of a shard, or of all that it computes with."""
        return (self.shard if is_sharded else self.local) * self.weight.dtype.size


@dataclasses.dataclass(frozen=True, eq=False)
class RankParts:
    """The parts of ranks at one place of a pipeline, of all weights of their stages, in the order of `traced.weights`."""

    parts: tuple[Part, ...]

    @functools.cached_property
    def by_path(self) -> dict[str, Part]:
        """The parts by the paths of their weights."""
        return {part.weight.path: part for part in self.parts}

    @functools.cached_property
    def trained(self) -> dict[int, Part]:
        """Those that are trained, by their places, ascending."""
        return dict(sorted({part.place: part for part in self.parts if part.place is not None}.items()))

    @functools.cached_property
    def buckets(self) -> list[list[Part]]:
        """Those that are trained by the messages in which their gradients are summed over the replicas, the last ones first."""
        last_first = list(self.trained.values())[::-1]
        buckets = assign_buckets([part.bytes for part in last_first], ShardingConfig().bucket_bytes)
        return [[last_first[number] for number in bucket] for bucket in buckets]

    @functools.cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the whole gradients of what is trained."""
        return sum(part.bytes for part in self.trained.values())

    @functools.cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all that ZeRO shards, whole."""
        return sum(part.bytes for part in self.parts if part.weight.is_parameter)


def parts_at(traced: TracedModel, candidate: Candidate, pipe: int) -> RankParts:
    """Returns what ranks at place `pipe` of a pipeline keep."""
    sizes = candidate.shards, candidate.tensor, candidate.pipeline, candidate.stages_per_rank  # all that decides it
    return parts_by_pipe(traced, *sizes)[pipe]


@functools.lru_cache(maxsize=256)
def parts_by_pipe(traced: TracedModel, shards: int, tensor: int, pipeline: int, stages_per_rank: int) -> list[RankParts]:
    """Returns what ranks at each place of a pipeline keep."""
    axes = traced.layouts.axes(tensor) if tensor > 1 else {}
    owners = traced.layouts.owners(pipeline, stages_per_rank) if pipeline > 1 else {}
    places = {weight.path: place for place, weight in enumerate(traced.trained)}
    found: list[list[Part]] = [[] for _ in range(pipeline)]
    for weight in traced.weights:
        local, axis = list(weight.shape), axes.get(weight.path)
        if axis is not None:
            local[axis] = -(-local[axis] // tensor)
        elements = math.prod(local)
        for pipe in owners.get(weight.path, range(pipeline)):
            found[pipe].append(Part(weight, places.get(weight.path), elements, -(-elements // shards)))
    return [RankParts(tuple(parts)) for parts in found]
