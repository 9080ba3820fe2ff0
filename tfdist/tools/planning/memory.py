"""The memory of one device under a plan: model state by arithmetic, to the byte, and on top of it what a step takes."""

import dataclasses
import functools
import math

from tfdist import errors
from tfdist.optimizers.ownership import balanced_owners
from tfdist.sharding import Shard, placements_of, travels_exactly
from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.device_memory import DeviceMemory
from tfdist.tools.planning.parts import Part, parts_at
from tfdist.tools.planning.step_memory import step_memory
from tfdist.tools.planning.traced_model import TracedModel

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
        on_gpu: whether it is a GPU, which holds more beside the step's graph (`in_step`).

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
    given = traced.input_bytes(math.ceil(batch_size / candidate.data))
    states = [state_of(traced, _of_state(candidate), pipe) for pipe in range(candidate.pipeline)]
    steps = [step_memory(traced, candidate, microbatch, pipe) for pipe in range(candidate.pipeline)]
    found = [in_step(state, *step, given, on_gpu) for state, step in zip(states, steps, strict=True)]
    return max(found, key=lambda memory: memory.together)


def in_step(state: DeviceMemory, peak: int, buffers: int, given: int, on_gpu: bool) -> DeviceMemory:
    """Returns state and step in one: what is full when a step's gradients are not, is not counted twice.

    Args:
        state: the model state of the device.
        peak: bytes that its graph keeps, when they are most.
        buffers: of messages and of what is gathered, among them.
        given: bytes of a batch.
        on_gpu: whether it is a GPU, which holds besides the temporary tensors of the updates, and the next batches.
    """
    besides = round(_TEMPORARY * state.optimizer) + _BATCHES_AHEAD * given if on_gpu else 0
    activations = max(peak + given + besides - state.gradients - buffers, 0)
    return dataclasses.replace(state, activations=activations, buffers=buffers)


def _of_state(candidate: Candidate) -> Candidate:
    """Returns the candidate without what its model state does not depend on."""
    schedule = candidate.schedule and ("interleaved" if candidate.stages_per_rank > 1 else "1f1b")
    return dataclasses.replace(candidate, gradient_compression=None, schedule=schedule, microbatches=1, recompute=False)


@functools.lru_cache(maxsize=4096)
def state_of(traced: TracedModel, candidate: Candidate, pipe: int = 0) -> DeviceMemory:
    """Returns the model state of the fullest replica's device at rank `pipe` of the pipeline, as `tfdist.memory_report` does."""
    placements = placements_of(candidate.zero_stage)
    parts = parts_at(traced, candidate, pipe).parts
    sharded, reduced = isinstance(placements.parameter, Shard), isinstance(placements.gradient, Shard)
    parameters = sum(part.stored(sharded and part.weight.is_parameter) for part in parts)
    parameters += sum(part.stored(True) for part in parts if _is_rounded(candidate, part))
    gradients = sum(part.stored(reduced) for part in parts if part.weight.trainable)
    return DeviceMemory(parameters, gradients, max(_slot_bytes(traced, candidate, pipe)))


def _is_rounded(candidate: Candidate, part: Part) -> bool:
    """Whether ranks hold rounded copies of a weight, and exact shards besides, which are updated: as `rounds_copies` says."""
    if candidate.zero_stage not in (1, 2) or candidate.parameter_compression is None or candidate.shards == 1:
        return False
    weight = part.weight
    return weight.trainable and weight.is_parameter and weight.dtype.size <= 4 and not travels_exactly(weight.shape)


def _slot_bytes(traced: TracedModel, candidate: Candidate, pipe: int) -> list[int]:
    """Returns the bytes of the optimizer's variables, of each data rank that differs from the others."""
    is_sharded = isinstance(placements_of(candidate.zero_stage).optimizer_state, Shard)
    owners = _data_owners(traced, candidate, is_sharded)
    trained = parts_at(traced, candidate, pipe).trained
    of_all, of_rank = 0, [0] * (candidate.shards if owners else 1)
    for slot in traced.slots:
        part = None if slot.of is None else trained.get(slot.of)
        if part is None:
            of_all += slot.bytes if slot.of is None else 0
        elif slot.shape != part.weight.shape or not slot.dtype.is_floating:
            of_all += slot.bytes
        elif slot.of in owners:
            of_rank[owners[slot.of]] += slot.bytes
        else:
            of_all += (part.shard if is_sharded else part.local) * slot.dtype.size
    return [of_all + own for own in of_rank]


def _data_owners(traced: TracedModel, candidate: Candidate, is_sharded: bool) -> dict[int, int]:
    """Returns which data rank keeps the whole state of a parameter that the optimizer looks at whole."""
    if traced.is_elementwise:
        return {}
    trained: dict[int, Part] = {}
    for pipe in range(candidate.pipeline):
        trained |= parts_at(traced, candidate, pipe).trained
    whole = [trained[place] for place in sorted(trained) if is_sharded or trained[place].local < trained[place].weight.elements]
    owners = balanced_owners([part.weight.bytes for part in whole], candidate.shards)
    return dict(zip([part.place for part in whole], owners, strict=True))
