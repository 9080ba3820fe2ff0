"""What a step holds on a device on top of parameters and optimizer state, at its fullest moment."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from tfdist.collectives import assign_buckets
from tfdist.planning.candidate import Candidate
from tfdist.planning.layouts import held_at_most
from tfdist.planning.parts import Part, parts_at
from tfdist.planning.step_profile import StepProfile
from tfdist.planning.traced_model import TracedModel
from tfdist.sharding import Shard, ShardingConfig, layers_within, placements_of

_DEFAULTS = ShardingConfig()


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes of a step.

    Attributes:
        peak: of gradients, activations and buffers together, when they are most.
        buffers: of messages and of what is gathered, among them.
    """

    peak: int
    buffers: int


def step_memory(traced: TracedModel, candidate: Candidate, microbatch: int, pipe: int) -> StepMemory:
    """Returns what a step holds on the devices at rank `pipe` of a pipeline, with `microbatch` examples at a time."""
    profile = traced.profile(microbatch, candidate.tensor)
    if candidate.pipeline > 1:
        return _of_stages(traced, candidate, profile, pipe)
    rank = parts_at(traced, candidate, pipe)
    trained = list(rank.trained.values())
    live = _recomputed(traced, profile) if candidate.recompute else profile.activations
    buffers = _messages(candidate, rank.gradient_sizes) + _gathered(traced, candidate, rank.parts)
    return StepMemory(int((live + _gradients(candidate, profile, trained)).max()) + buffers, buffers)


def _gradients(candidate: Candidate, profile: StepProfile, trained: Sequence[Part]) -> np.ndarray:
    """Returns the bytes of gradients during each operation: whole, or of shards that have been reduced."""
    is_sharded = isinstance(placements_of(candidate.zero_stage).gradient, Shard)
    born = np.zeros(len(profile.activations), np.int64)
    for place, part in enumerate(trained):
        if profile.gradients[place] >= 0:
            born[profile.gradients[place]] += (part.shard if is_sharded else part.local) * part.itemsize
    return np.cumsum(born)


def _recomputed(traced: TracedModel, profile: StepProfile) -> np.ndarray:
    """Returns the activations if blocks keep between forward and backward what they return, and nothing else."""
    live = profile.activations.copy()
    for place in traced.recomputed_calls:
        first, last = profile.windows[place, 1] + 1, profile.windows[place, 2]
        dropped = profile.of_calls[place, first:last] - traced.output_bytes(place, profile.batch_size)
        live[first:last] -= np.maximum(dropped, 0)
    return live


def _messages(candidate: Candidate, sizes: tuple[int, ...]) -> int:
    """Returns the bytes of messages in which gradients are summed over the replicas: each packed, and what arrives.

    Stage 0 sums all gradients before it updates: with links slower than backward all messages are there at once.
    """
    if candidate.data == 1 or candidate.zero_stage == 3:
        return 0
    return 2 * (sum(sizes) if candidate.zero_stage == 0 else max(_buckets(sizes), default=0))


@functools.lru_cache(maxsize=1024)
def _buckets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    last_first = sizes[::-1]
    buckets = assign_buckets(last_first, _DEFAULTS.bucket_bytes)
    return tuple(sum(last_first[place] for place in bucket) for bucket in buckets)


def _gathered(traced: TracedModel, candidate: Candidate, parts: Sequence[Part]) -> int:
    """Returns the bytes of layers that are gathered at once, and of the whole gradients of one: stage 3."""
    if candidate.data == 1 or candidate.zero_stage != 3:
        return 0
    groups = _groups(traced, tuple(parts))
    window = _DEFAULTS.prefetch + 1
    at_once = max((sum(groups[start : start + window]) for start in range(len(groups))), default=0)
    return at_once + max(groups, default=0)


@functools.lru_cache(maxsize=64)
def _groups(traced: TracedModel, parts: tuple[Part, ...]) -> tuple[int, ...]:
    """Returns the bytes of what is gathered at once: a layer, or small ones that follow each other."""
    by_path = {part.weight.path: part for part in parts}
    groups: list[int] = []
    filled = _DEFAULTS.group_bytes + 1
    for layer in layers_within(traced.model):
        own = [by_path[v.path] for v in layer._trainable_variables if v.path in by_path]
        size = sum(part.local * part.itemsize for part in own if part.is_parameter)
        if not size:
            continue
        if filled + size <= _DEFAULTS.group_bytes:
            groups[-1] += size
            filled += size
        else:
            groups.append(size)
            filled = size
    return tuple(groups)


def _of_stages(traced: TracedModel, candidate: Candidate, profile: StepProfile, pipe: int) -> StepMemory:
    """Returns what a rank of a pipeline holds: what its stages keep of each microbatch that is under way, and their sums of
    gradients, which are whole until the last microbatch is through."""
    calls = traced.calls_of_stages(candidate.stages)
    rank = parts_at(traced, candidate, pipe)
    gradients = sum(rank.gradient_sizes)
    kept, peaks, passing = [], [], 0
    for stage in range(pipe, candidate.stages, candidate.pipeline):
        most, whole = _of_calls(profile, tuple(calls[stage]))
        inputs = traced.output_bytes(calls[stage - 1][-1], profile.batch_size) if stage and calls[stage - 1] else 0
        outputs = traced.output_bytes(calls[stage][-1], profile.batch_size) if calls[stage] else 0
        kept.append(inputs + (0 if candidate.recompute else whole))
        peaks.append(most - (0 if candidate.recompute else whole))
        passing += inputs + outputs
    sizes = candidate.pipeline, candidate.microbatches, candidate.stages_per_rank
    held = held_at_most(candidate.schedule or "", *sizes)[pipe]
    activations = held * sum(kept) // max(len(kept), 1) + max(peaks, default=0)
    buffers = passing + _messages(candidate, rank.gradient_sizes)
    if candidate.zero_stage == 3 and candidate.data > 1:
        buffers += rank.parameter_bytes
    return StepMemory(activations + gradients + buffers, buffers)


@functools.lru_cache(maxsize=4096)
def _of_calls(profile: StepProfile, calls: tuple[int, ...]) -> tuple[int, int]:
    """Returns the most bytes that calls hold together during a step, and what they keep for backward."""
    if not calls:
        return 0, 0
    return int(profile.of_calls[list(calls)].sum(axis=0).max()), int(profile.kept[list(calls)].sum())
