"""What ranks keep of each weight of a model under a plan."""

from __future__ import annotations

import dataclasses
import functools
import math

import tensorflow as tf

from tfdist.planning.candidate import Candidate
from tfdist.planning.traced_model import TracedModel, Weight


@dataclasses.dataclass(frozen=True)
class Part:
    """What one rank keeps of a weight.

    Attributes:
        weight: the weight.
        local: elements, sharded over the tensor axis.
        shard: elements of one flat shard of these over the replicas, padding included.
        owners: the ranks of the pipeline that keep it.
    """

    weight: Weight
    local: int
    shard: int
    owners: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _dtype(self.weight.dtype).size

    @property
    def is_parameter(self) -> bool:
        """Whether ZeRO shards it."""
        return self.weight.is_parameter and _dtype(self.weight.dtype).is_floating

    @property
    def bytes(self) -> int:
        """Bytes of what a rank computes with: whole, but for the tensor axis."""
        return self.local * self.itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class RankParts:
    """What the ranks at one place of a pipeline keep.

    Attributes:
        parts: of all weights of their stages, in the order of `traced.weights`.
        trained: of those that are trained, by their places in `traced.trained`, ascending.
    """

    parts: tuple[Part, ...]
    trained: dict[int, Part]

    @functools.cached_property
    def gradient_sizes(self) -> tuple[int, ...]:
        """Bytes of the whole gradients of what is trained."""
        return tuple(part.bytes for part in self.trained.values())

    @functools.cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all that ZeRO shards, whole."""
        return sum(part.bytes for part in self.parts if part.is_parameter)


@functools.cache
def _dtype(name: str) -> tf.DType:
    return tf.as_dtype(name)


def parts_of(traced: TracedModel, candidate: Candidate) -> tuple[Part, ...]:
    """Returns what ranks keep of each weight, in the order of `traced.weights`."""
    return _parts(traced, *_sizes(candidate))


def parts_at(traced: TracedModel, candidate: Candidate, pipe: int) -> RankParts:
    """Returns what ranks at place `pipe` of a pipeline keep."""
    return _by_pipe(traced, *_sizes(candidate))[pipe]


def _sizes(candidate: Candidate) -> tuple[int, int, int, int]:
    """Returns all of a candidate that decides what ranks keep."""
    return candidate.shards, candidate.tensor, candidate.pipeline, candidate.stages_per_rank


@functools.lru_cache(maxsize=256)
def _parts(traced: TracedModel, shards: int, tensor: int, pipeline: int, stages_per_rank: int) -> tuple[Part, ...]:
    axes = traced.layouts.axes(tensor) if tensor > 1 else {}
    owners = traced.layouts.owners(pipeline, stages_per_rank) if pipeline > 1 else {}
    parts = []
    for weight in traced.weights:
        local, axis = list(weight.shape), axes.get(weight.path)
        if axis is not None:
            local[axis] = -(-local[axis] // tensor)
        elements = math.prod(local)
        parts.append(Part(weight, elements, -(-elements // shards), owners.get(weight.path, tuple(range(pipeline)))))
    return tuple(parts)


@functools.lru_cache(maxsize=256)
def _by_pipe(traced: TracedModel, shards: int, tensor: int, pipeline: int, stages_per_rank: int) -> list[RankParts]:
    found: list[list[Part]] = [[] for _ in range(pipeline)]
    for part in _parts(traced, shards, tensor, pipeline, stages_per_rank):
        for pipe in part.owners:
            found[pipe].append(part)
    place_of = {weight.path: place for place, weight in enumerate(traced.trained)}
    ranks = []
    for parts in found:
        trained = {place_of[part.weight.path]: part for part in parts if part.weight.path in place_of}
        ranks.append(RankParts(tuple(parts), dict(sorted(trained.items()))))
    return ranks
