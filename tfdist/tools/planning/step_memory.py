"""The memory of a step on a device, on top of parameters and optimizer state, at its fullest moment."""

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from tfdist.sharding import Shard, ShardingConfig, placements_of
from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.gathers import gathers_of
from tfdist.tools.planning.layouts import held_at_most
from tfdist.tools.planning.parts import parts_at
from tfdist.tools.planning.step_profile import StepProfile
from tfdist.tools.planning.traced_model import TracedModel

_DEFAULTS = ShardingConfig()


def step_memory(traced: TracedModel, candidate: Candidate, microbatch: int, pipe: int) -> tuple[int, int]:
    """Returns what a step holds on the devices at rank `pipe` of a pipeline, with `microbatch` examples at a time.

    That is the bytes of gradients, activations and buffers together, when they are most, and of the buffers among them: of
    messages and of what is gathered.
    """
    profile = traced.profile(microbatch, candidate.tensor, is_one_graph=candidate.pipeline == 1)
    if candidate.pipeline > 1:
        return _of_stages(traced, candidate, profile, pipe)
    live = _recomputed(traced, profile) if candidate.recompute else profile.activations
    buffers = np.zeros(len(live), np.int64)
    if candidate.data > 1:
        is_gathered, tensor = candidate.zero_stage == 3, candidate.tensor
        buffers = _gathered(traced, profile, tensor, candidate.recompute) if is_gathered else _messages(traced, profile, tensor)
    together = live + _gradients(traced, candidate, profile) + buffers
    fullest = int(np.argmax(together))
    return int(together[fullest]), int(buffers[fullest])


def _gradients(traced: TracedModel, candidate: Candidate, profile: StepProfile) -> np.ndarray:
    """Returns the bytes of gradients during each operation: whole, or of shards that have been reduced."""
    is_sharded = isinstance(placements_of(candidate.zero_stage).gradient, Shard)
    sizes = {place: part.stored(is_sharded) for place, part in parts_at(traced, candidate, 0).trained.items()}
    if candidate.zero_stage < 3 or candidate.data == 1 or not traced.updates_each_alone:
        return _made(profile, sizes)
    return _made(profile, sizes) - _updated(traced, candidate, profile, sizes)


def _updated(traced: TracedModel, candidate: Candidate, profile: StepProfile, sizes: Mapping[int, int]) -> np.ndarray:
    """Returns the bytes of shards of gradients with which weights have been updated before each operation: stage 3.

    A shard is there until it has been reduced, and then updates its weights: by the time at which the gradients of the second
    group after it are made, which wait for it.
    """
    gathers = gathers_of(traced, candidate.tensor, candidate.recompute, _DEFAULTS.group_bytes, _DEFAULTS.prefetch)
    numbers = {path: number for number in reversed(range(len(gathers))) for path in gathers[number].paths}
    gone = np.zeros(len(profile.activations) + 2, np.int64)
    for place, size in sizes.items():
        number, made = numbers.get(traced.trained[place].path, 0), int(profile.gradients[place])
        if number >= 2 and made >= 0:
            gone[max(_window(profile, gathers[number - 2].calls)[3], made) + 1] += size
    return np.cumsum(gone)[: len(profile.activations)]


def _made(profile: StepProfile, sizes: Mapping[int, int]) -> np.ndarray:
    """Returns the bytes of gradients, whose sizes are given by their places, that are made by the end of each operation."""
    born = np.zeros(len(profile.activations), np.int64)
    for place, size in sizes.items():
        if profile.gradients[place] >= 0:
            born[profile.gradients[place]] += size
    return np.cumsum(born)


def _recomputed(traced: TracedModel, profile: StepProfile) -> np.ndarray:
    """Returns the activations if blocks keep between forward and backward what they return, and nothing else."""
    live = profile.activations.copy()
    for place in traced.recomputed_calls:
        first, last = profile.windows[place, 1] + 1, profile.windows[place, 2]
        dropped = profile.of_calls[place, first:last] - traced.output_bytes(place, profile.batch_size)
        live[first:last] -= np.maximum(dropped, 0)
    return live


@functools.lru_cache(maxsize=64)
def _messages(traced: TracedModel, profile: StepProfile, tensor: int) -> np.ndarray:
    """Returns the bytes, during each operation, of the message in which gradients are summed over the replicas: packed, and what
    arrives. The first leaves when all its gradients are there."""
    most = np.zeros(len(profile.activations), np.int64)
    for bucket in parts_at(traced, Candidate(tensor=tensor), 0).buckets:
        ready = max(0, *(int(profile.gradients[part.place]) for part in bucket))
        most[ready:] = np.maximum(most[ready:], 2 * sum(part.bytes for part in bucket))
    return most


@functools.lru_cache(maxsize=64)
def _gathered(traced: TracedModel, profile: StepProfile, tensor: int, recompute: bool) -> np.ndarray:
    """Returns the bytes, during each operation, of layers that are gathered and of whole gradients on their way: stage 3.

    A group is gathered when the one `prefetch + 1` before it has been read, and dropped when it has been read itself; its whole
    gradients are there until the next group's are made. The strategy keeps their order, so that `prefetch + 1` are there at once
    and the gradients of one; without it operations of several layers run among each other.
    """
    live = np.zeros(len(profile.activations) + 1, np.int64)
    gathers, ahead = gathers_of(traced, tensor, recompute, _DEFAULTS.group_bytes, _DEFAULTS.prefetch), _DEFAULTS.prefetch + 1
    windows = [_window(profile, one.calls) for one in gathers]
    by_path = parts_at(traced, Candidate(tensor=tensor), 0).by_path
    sizes = [sum(by_path[path].bytes for path in one.paths) for one in gathers]

    def add(size: int, start: int, stop: int) -> None:
        if start <= stop:
            live[start] += size
            live[stop + 1] -= size

    for place, (size, (_, forward, begin, end)) in enumerate(zip(sizes, windows, strict=True)):
        add(size, windows[place - ahead][1] + 1 if place >= ahead else 0, forward)
        later = windows[place + ahead :]
        add(size, min(later[0][3] + 1 if later else profile.forward, begin), end)
        add(size, begin, windows[place - 1][3] if place else len(live) - 2)
    at_once = max((sum(sizes[start : start + ahead]) for start in range(len(sizes))), default=0)
    return np.minimum(np.cumsum(live)[:-1], at_once + max(sizes, default=0))


def _window(profile: StepProfile, calls: Sequence[int]) -> tuple[int, int, int, int]:
    """Returns the first and the last operation of forward, and of backward, of some calls together."""
    first, last, begin, end = (profile.windows[list(calls), side] for side in range(4))
    latest = len(profile.activations) - 1
    return int(first.min()), int(last.max()), min(int(begin.min()), latest), min(int(end.max()), latest)


def _of_stages(traced: TracedModel, candidate: Candidate, profile: StepProfile, pipe: int) -> tuple[int, int]:
    """Returns what a rank of a pipeline holds: what its stages keep of each microbatch that is under way, the gradients of one
    that are not added up yet, and their sums, which are whole until the last microbatch is through."""
    calls = traced.calls_of_stages(candidate.stages)
    rank = parts_at(traced, candidate, pipe)
    gradients = rank.gradient_bytes
    kept, peaks, passing = [], [], 0
    for stage in range(pipe, candidate.stages, candidate.pipeline):
        most, whole = _of_calls(traced, profile, candidate.tensor, tuple(calls[stage]))
        inputs = traced.output_bytes(calls[stage - 1][-1], profile.batch_size) if stage and calls[stage - 1] else 0
        outputs = traced.output_bytes(calls[stage][-1], profile.batch_size) if calls[stage] else 0
        kept.append(inputs + (0 if candidate.recompute else whole))
        peaks.append(most - (0 if candidate.recompute else whole))
        passing += inputs + outputs
    sizes = candidate.pipeline, candidate.microbatches, candidate.stages_per_rank
    held = held_at_most(candidate.schedule or "", *sizes)[pipe]
    activations = held * sum(kept) // max(len(kept), 1) + max(peaks, default=0)
    during = passing + (rank.parameter_bytes if candidate.zero_stage == 3 and candidate.data > 1 else 0)
    after = 0  # the sums travel when the last microbatch is through
    if candidate.data > 1 and candidate.zero_stage < 3:
        after = max((2 * sum(part.bytes for part in bucket) for bucket in rank.buckets), default=0)
    if activations + during >= after:
        return activations + gradients + during, during
    return gradients + after, after


@functools.lru_cache(maxsize=4096)
def _of_calls(traced: TracedModel, profile: StepProfile, tensor: int, calls: tuple[int, ...]) -> tuple[int, int]:
    """Returns the most bytes that calls hold together during a step, and what they keep for backward.

    Among the first are gradients, until they have been added to the sums: when those of the layer before are made.
    """
    if not calls:
        return 0, 0
    by_path = dict(parts_at(traced, Candidate(tensor=tensor), 0).by_path)
    made: list[tuple[int, dict[int, int]]] = []  # of each layer, when the last of its gradients is made, and their bytes
    for layer in (traced.calls[place].layer for place in calls):
        paths = [variable.path for variable in layer.trainable_variables] if layer is not None else []
        own = [by_path.pop(path) for path in paths if path in by_path]
        sizes = {x.place: x.bytes for x in own if x.place is not None and profile.gradients[x.place] >= 0}
        made += [(int(profile.gradients[list(sizes)].max()), sizes)] if sizes else []
    gradients = np.zeros(len(profile.activations), np.int64)
    made.sort(key=lambda one: one[0])
    for (_, sizes), (end, _) in zip(made, made[1:] + made[-1:], strict=True):
        gradients[: end + 1] += _made(profile, sizes)[: end + 1]
    kept = int(profile.kept[list(calls)].sum()) - int(profile.kept_for_later[calls[-1]])  # which the next stage keeps
    return int((profile.of_calls[list(calls)].sum(axis=0) + gradients).max()), kept
