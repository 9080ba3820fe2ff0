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
        return tf.as_dtype(self.weight.dtype).size

    @property
    def is_parameter(self) -> bool:
        """Whether ZeRO shards it."""
        return self.weight.is_parameter and tf.as_dtype(self.weight.dtype).is_floating


def parts_of(traced: TracedModel, candidate: Candidate) -> tuple[Part, ...]:
    """Returns what ranks keep of each weight, in the order of `traced.weights`."""
    return _parts(
        traced, candidate.shards, candidate.tensor, candidate.pipeline, candidate.schedule or "", candidate.microbatches
    )


@functools.lru_cache(maxsize=256)
def _parts(traced: TracedModel, shards: int, tensor: int, pipeline: int, schedule: str, microbatches: int) -> tuple[Part, ...]:
    axes = traced.layouts.axes(tensor) if tensor > 1 else {}
    owners = traced.layouts.owners(pipeline, schedule, microbatches) if pipeline > 1 else {}
    parts = []
    for weight in traced.weights:
        local, axis = list(weight.shape), axes.get(weight.path)
        if axis is not None:
            local[axis] = -(-local[axis] // tensor)
        elements = math.prod(local)
        parts.append(Part(weight, elements, -(-elements // shards), owners.get(weight.path, tuple(range(pipeline)))))
    return tuple(parts)
