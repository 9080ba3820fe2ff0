"""What one device holds under a plan: model state by arithmetic, to the byte, and on top of it what a step takes."""

from __future__ import annotations

import dataclasses
import functools
import math

import tensorflow as tf

from tfdist import errors
from tfdist.optimizers.ownership import balanced_owners
from tfdist.planning.candidate import Candidate
from tfdist.planning.device_memory import DeviceMemory
from tfdist.planning.parts import Part, parts_at, parts_of
from tfdist.planning.step_memory import StepMemory, step_memory
from tfdist.planning.traced_model import TracedModel
from tfdist.sharding import Shard, placements_of, travels_exactly

# Batches that are on a GPU before their step: one is kept there, and one is on its way (`tf.data`'s prefetch to devices).
_BATCHES_AHEAD = 2
# Of the optimizer's variables: what the updates of all parameters hold at once on a GPU, where TensorFlow's executor goes over
# them breadth first. With Adam about as much as the parameters that a rank updates, by the peaks of an NVIDIA H200's allocator.
_TEMPORARY = 0.5


def memory_of(traced: TracedModel, candidate: Candidate, batch_size: int, *, on_gpu: bool = False) -> DeviceMemory:
    """Returns what the fullest device holds in a step.

    Parameters, gradients and optimizer state are those that `tfdist.memory_report` reports. What a step holds on top of them in
    its fullest moment is `activations` and `buffers`; gradients that are not there yet then are taken from the activations.

    Args:
        traced: the model.
        candidate: the plan.
        batch_size: examples of a step, of all replicas together.
        on_gpu: whether it is a GPU, which holds more beside the step's graph (`on_gpu_besides`).

    Raises:
        ValueError: the batch has fewer examples than there are replicas and microbatches, or the model cannot be trained so.
    """
    pieces = candidate.data * candidate.microbatches
    if batch_size < pieces:
        raise errors.value_error(
            f"`batch_size` must be at least {pieces}, an example for each replica's microbatch.",
            batch_size=batch_size,
            data=candidate.data,
            microbatches=candidate.microbatches,
        )
    microbatch = math.ceil(math.ceil(batch_size / candidate.data) / candidate.microbatches)
    fullest: DeviceMemory | None = None
    given = traced.input_bytes(math.ceil(batch_size / candidate.data))
    for pipe, state in enumerate(_states(traced, _of_state(candidate))):
        step = step_memory(traced, candidate, microbatch, pipe)
        besides = on_gpu_besides(state, given) if on_gpu else 0
        memory = _together(state, dataclasses.replace(step, peak=step.peak + given + besides))
        fullest = memory if fullest is None or memory.together > fullest.together else fullest
    assert fullest is not None
    return fullest


def on_gpu_besides(state: DeviceMemory, given: int) -> int:
    """Returns what a GPU holds beside what a step's graph keeps: the temporary tensors of the updates, and the next batches.

    Args:
        state: the model state of the device.
        given: bytes of a batch.
    """
    return round(_TEMPORARY * state.optimizer) + _BATCHES_AHEAD * given


def _of_state(candidate: Candidate) -> Candidate:
    """Returns the candidate without what its model state does not depend on."""
    schedule = candidate.schedule and ("interleaved" if candidate.stages_per_rank > 1 else "1f1b")
    exact = dataclasses.replace(candidate, gradient_compression=None)
    return dataclasses.replace(exact, schedule=schedule, microbatches=1, recompute=False)


@functools.lru_cache(maxsize=1024)
def _states(traced: TracedModel, candidate: Candidate) -> list[DeviceMemory]:
    """Returns `state_of` each rank of the pipeline."""
    return [state_of(traced, candidate, pipe) for pipe in range(candidate.pipeline)]


def _together(state: DeviceMemory, step: StepMemory) -> DeviceMemory:
    """Returns state and step in one: what is full when a step's gradients are not, is not counted twice."""
    activations = max(step.peak - state.gradients - step.buffers, 0)
    return dataclasses.replace(state, activations=activations, buffers=step.buffers)


def state_of(traced: TracedModel, candidate: Candidate, pipe: int = 0) -> DeviceMemory:
    """Returns the model state of the fullest replica's device at rank `pipe` of the pipeline, as `tfdist.memory_report` does."""
    placements = placements_of(candidate.zero_stage)
    parts = parts_at(traced, candidate, pipe).parts
    is_sharded = {kind: isinstance(getattr(placements, kind), Shard) for kind in ("parameter", "gradient", "optimizer_state")}
    parameters = sum(
        (part.shard if is_sharded["parameter"] and part.is_parameter else part.local) * part.itemsize for part in parts
    )
    parameters += sum(part.shard * part.itemsize for part in parts if _is_rounded(candidate, part))
    gradients = sum(
        (part.shard if is_sharded["gradient"] else part.local) * part.itemsize for part in parts if part.weight.trainable
    )
    return DeviceMemory(parameters, gradients, max(_slot_bytes(traced, candidate, pipe)))


def _is_rounded(candidate: Candidate, part: Part) -> bool:
    """Whether ranks hold rounded copies of a weight, and exact shards besides, which are updated: as `rounds_copies` says."""
    if candidate.zero_stage not in (1, 2) or candidate.parameter_compression is None or candidate.shards == 1:
        return False
    return part.weight.trainable and part.is_parameter and part.itemsize <= 4 and not travels_exactly(part.weight.shape)


def _slot_bytes(traced: TracedModel, candidate: Candidate, pipe: int) -> list[int]:
    """Returns the bytes of the optimizer's variables, of each data rank that differs from the others."""
    is_sharded = isinstance(placements_of(candidate.zero_stage).optimizer_state, Shard)
    owners = _data_owners(traced, candidate, is_sharded)
    of_all = traced.other_slot_bytes
    of_rank = [0] * (candidate.shards if owners else 1)
    for place, part in parts_at(traced, candidate, pipe).trained.items():
        for slot in traced.slots_of_parameters[place]:
            size = tf.as_dtype(slot.dtype)
            if slot.shape != part.weight.shape or not size.is_floating:
                of_all += slot.bytes
            elif place in owners:
                of_rank[owners[place]] += slot.bytes
            else:
                of_all += (part.shard if is_sharded else part.local) * size.size
    return [of_all + own for own in of_rank]


def _data_owners(traced: TracedModel, candidate: Candidate, is_sharded: bool) -> dict[int, int]:
    """Returns which data rank keeps the whole state of a parameter that the optimizer looks at whole."""
    if traced.is_elementwise:
        return {}
    by_path = {part.weight.path: part for part in parts_of(traced, candidate)}
    parts = [by_path[weight.path] for weight in traced.trained]
    places = [place for place, part in enumerate(parts) if is_sharded or part.local < part.weight.elements]
    sizes = [parts[place].weight.bytes for place in places]
    return dict(zip(places, balanced_owners(sizes, candidate.shards), strict=True))
