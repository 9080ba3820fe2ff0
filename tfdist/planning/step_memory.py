"""What a step holds on a device on top of parameters and optimizer state, at its fullest moment."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from tfdist.collectives import assign_buckets
from tfdist.pipeline.schedules.dataflow import held_activations
from tfdist.planning.candidate import Candidate
from tfdist.planning.parts import Part
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


def step_memory(traced: TracedModel, candidate: Candidate, microbatch: int, pipe: int, parts: Sequence[Part]) -> StepMemory:
    """Returns what a step holds on the devices at rank `pipe` of a pipeline, with `microbatch` examples at a time."""
    profile = traced.profile(microbatch, candidate.tensor)
    by_path = {part.weight.path: part for part in parts}
    trained = [by_path[weight.path] for weight in traced.trained]
    if candidate.pipeline > 1:
        return _of_stages(traced, candidate, profile, pipe, trained, parts)
    live = _recomputed(traced, profile) if candidate.recompute else profile.activations
    buffers = _messages(candidate, trained) + _gathered(traced, candidate, parts)
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


def _messages(candidate: Candidate, trained: Sequence[Part]) -> int:
    """Returns the bytes of messages in which gradients are summed over the replicas: each packed, and what arrives.

    Stage 0 sums all gradients before it updates: with links slower than backward all messages are there at once.
    """
    if candidate.data == 1 or candidate.zero_stage == 3:
        return 0
    sizes = tuple(part.local * part.itemsize for part in trained)
    return 2 * (sum(sizes) if candidate.zero_stage == 0 else max(_buckets(sizes), default=0))


@functools.lru_cache(maxsize=64)
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


def _of_stages(
    traced: TracedModel,
    candidate: Candidate,
    profile: StepProfile,
    pipe: int,
    trained: Sequence[Part],
    parts: Sequence[Part],
) -> StepMemory:
    """Returns what a rank of a pipeline holds: what its stages keep of each microbatch that is under way, and their sums of
    gradients, which are whole until the last microbatch is through."""
    staged = traced.layouts.staged(candidate.pipeline, candidate.schedule or "", candidate.microbatches)
    schedule = staged.schedule
    calls = traced.calls_of_stages(staged)
    mine = [stage for stage in range(len(staged.stages)) if schedule.rank_of(stage) == pipe]
    own = [part for part in trained if pipe in part.owners]
    gradients = sum(part.local * part.itemsize for part in own)
    kept, peaks, passing = [], [], 0
    for stage in mine:
        live = profile.of_calls[calls[stage]].sum(axis=0) if calls[stage] else np.zeros(1, np.int64)
        inputs = traced.output_bytes(calls[stage - 1][-1], profile.batch_size) if stage and calls[stage - 1] else 0
        outputs = traced.output_bytes(calls[stage][-1], profile.batch_size) if calls[stage] else 0
        kept.append(inputs + (0 if candidate.recompute else int(profile.kept[calls[stage]].sum())))
        peaks.append(int(live.max()) - (0 if candidate.recompute else kept[-1] - inputs))
        passing += inputs + outputs
    held = max(held_activations(schedule.actions(pipe)), default=1)
    activations = held * sum(kept) // max(len(kept), 1) + max(peaks, default=0)
    buffers = passing + _messages(candidate, own)
    if candidate.zero_stage == 3 and candidate.data > 1:
        buffers += sum(part.local * part.itemsize for part in parts if pipe in part.owners and part.is_parameter)
    return StepMemory(activations + gradients + buffers, buffers)
