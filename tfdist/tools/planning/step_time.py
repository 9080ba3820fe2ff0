"""How long a step takes: what one device computes, what it sends, and what of that is hidden behind the other.

    forward and backward    sum over operations of what their FLOPs, functions and bytes take, and what each costs (`hardware`)
    recomputation           once more what backward needs of forward
    stages 0, 1, 2          gradients travel while backward goes on: max(backward, messages) x overlap; then the update; stages 1
                            and 2 gather what was updated, stage 2 while backward goes on
    stage 3                 layers are gathered beside forward and again beside backward, with the gradients; in a pipeline once
    tensor ranks            each message stands between two layers: nothing hides it; those of forward are sent again with what is
                            recomputed
    pipeline                the schedule simulated, with the slowest stage's times and the messages of a border; and the gradients
                            of each microbatch added up

A message of S bytes takes alpha + S k / beta (`hardware`). Devices that share a processor (`sharing`) lose nothing while others
wait: a step then takes what all of them compute together, at least.
"""

import dataclasses
import functools

from tfdist.extensions.pipeline.schedules.actions import Phase
from tfdist.extensions.pipeline.schedules.simulation import simulate
from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.hardware import Hardware
from tfdist.tools.planning.layouts import schedule_of

# What compressed gradients take of float32's bytes: numbers of so many bits, and a scale of 4 bytes for each 256.
COMPRESSED = {None: 1.0, "bfloat16": 0.5, "int8": 0.25 + 1 / 256, "int4": 0.125 + 1 / 256, "top_k": 0.29}
# How often compressing and adding up goes over the numbers, read and written: encode, decode and sum, encode, decode.
_COMPRESSION_PASSES = 6
# How often all parameters or gradients are packed or unpacked in a step, and once more where stage 3 gathers again.
_PACKED = 2


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        compute: of the device that computes most, the update and recomputation included.
        communication: of its messages, hidden or not.
        hidden: how much of the messages overlaps with computation.
        bubble: what it waits for others of a pipeline.
        together: the step.
    """

    compute: float
    communication: float
    hidden: float
    bubble: float
    together: float


@dataclasses.dataclass(frozen=True)
class Step:
    """The work and the messages of one replica in a step under a candidate, of which `step_time` makes a time.

    Attributes:
        forward: seconds of forward of one microbatch, of all stages together, among all devices at work.
        backward: those of backward.
        stage_share: the part of them that a stage of the slowest rank has: 1 without a pipeline.
        parameter_bytes: bytes of the trained parameters that a device computes with, as they travel.
        parameters: how many these are.
        messages: in how many messages they travel, once.
        tensor_bytes: bytes that a device sends to its tensor peers in a step, times their factor k.
        tensor_messages: in how many messages.
        border_bytes: bytes of one microbatch's activations on the border of two stages.
        recomputed: the part of forward that backward computes again.
    """

    forward: float
    backward: float
    stage_share: float
    parameter_bytes: float
    parameters: float
    messages: int
    tensor_bytes: float = 0.0
    tensor_messages: int = 0
    border_bytes: float = 0.0
    recomputed: float = 0.0


def step_time(step: Step, candidate: Candidate, hardware: Hardware, devices_per_host: int) -> StepTime:
    """Returns how long a step takes that is spread over so many devices of each host, as the module's docstring says."""
    links = _Links(step, candidate, hardware, devices_per_host)
    forward, backward = step.forward, step.backward + step.recomputed * step.forward
    computed, bubble, border = _pipelined(links, forward, backward)
    # The gradients of each microbatch but the first are added to the sum: both are read, and it is written.
    computed += 3 * step.parameter_bytes * (candidate.microbatches - 1) / hardware.bytes_per_second
    # Messages are packed, and what arrives is unpacked: each is read and written.
    gathers_again = candidate.zero_stage == 3 and candidate.pipeline == 1
    packed = _PACKED + gathers_again if candidate.data > 1 else 0
    packing = packed * 2 * step.parameter_bytes / hardware.bytes_per_second
    part = backward / (forward + backward) if forward + backward else 0.0
    compressing = (
        _COMPRESSION_PASSES * step.parameter_bytes / hardware.bytes_per_second if candidate.gradient_compression else 0.0
    )
    reduce, gather = links.reduce(), links.gather()
    update = step.parameters / (candidate.shards if candidate.zero_stage else 1) * hardware.update_seconds
    beside_forward, beside_backward, behind = {
        0: (0.0, reduce, 0.0),
        1: (0.0, reduce, gather),
        2: (0.0, reduce + gather, 0.0),
        3: (gather, gather * gathers_again + reduce, 0.0),
    }[candidate.zero_stage]
    parts = ((computed * (1 - part), beside_forward), (computed * part + compressing + packing, beside_backward))
    passed = sum(_beside(compute, messages, hardware.overlap) for compute, messages in parts)
    share = step.stage_share * candidate.stages_per_rank
    exposed = behind + links.tensor(candidate.microbatches) * share
    communication = beside_forward + beside_backward + exposed + border
    compute = computed + compressing + packing + update
    together = passed + exposed + update + bubble + hardware.step_seconds
    hidden = max(0.0, communication + compute + bubble + hardware.step_seconds - together)
    return StepTime(compute, communication, min(hidden, communication), bubble, together)


def _beside(compute: float, messages: float, overlap: float) -> float:
    """Returns how long both take at once: of the shorter one `overlap` - 1 is not hidden, at most all of it."""
    return max(compute, messages) + min(overlap - 1, 1.0) * min(compute, messages)


def _pipelined(links: "_Links", forward: float, backward: float) -> tuple[float, float, float]:
    """Returns what the slowest device computes of all microbatches, what it waits, and its messages to the next stage."""
    step, candidate, hardware = links.step, links.candidate, links.hardware
    count = candidate.microbatches
    if candidate.pipeline == 1 or candidate.schedule is None:
        return (forward + backward) * count, 0.0, 0.0
    stage_forward, stage_backward = forward * step.stage_share, backward * step.stage_share
    between = links.tensor(1) * step.stage_share  # what tensor ranks of a stage send each other
    busy = (stage_forward + stage_backward) * count * candidate.stages_per_rank
    start, message = links.message(0.0), links.message(step.border_bytes)
    alone = 1 / hardware.sharing
    sizes = candidate.schedule, candidate.pipeline, count, candidate.stages_per_rank
    durations = [max(seconds * alone + between / 2, 1e-12) for seconds in (stage_forward, stage_backward)]
    total = _simulated(*sizes, *durations, message)
    exposed = between * count * candidate.stages_per_rank
    sent = 2 * count * candidate.stages_per_rank
    border = message * sent
    if hardware.is_shared:
        # All ranks together keep the processor as busy as they would each keep their own, with their messages as well: what a
        # message takes to start is time of the processor, of which nothing is left behind which it could hide.
        shared = (forward + backward) * count / candidate.pipeline + exposed + start * sent
        total = max(total, shared + min(hardware.overlap - 1, 1.0) * (message - start) * sent)
    return min(busy, total), max(0.0, total - busy - exposed), border


@functools.lru_cache(maxsize=1024)
def _simulated(
    schedule: str, ranks: int, microbatches: int, stages_per_rank: int, forward: float, backward: float, message: float
) -> float:
    """Returns how long a pipeline takes, with the seconds of a stage's forward and backward and of a message between two."""
    durations = {
        Phase.FORWARD: forward,
        Phase.BACKWARD: backward,
        Phase.BACKWARD_INPUT: max(backward / 2, 1e-12),
        Phase.BACKWARD_WEIGHT: max(backward / 2, 1e-12),
    }
    return simulate(schedule_of(schedule, ranks * stages_per_rank, microbatches, stages_per_rank), durations, message).total_time


@dataclasses.dataclass(frozen=True)
class _Links:
    """The time of a step's messages, over the links that the groups of a mesh use."""

    step: Step
    candidate: Candidate
    hardware: Hardware
    devices_per_host: int

    def reduce(self) -> float:
        """The gradients: summed; or scattered over the shards, and among groups of them summed."""
        candidate, size = self.candidate, self.step.parameter_bytes
        ratio = COMPRESSED.get(candidate.gradient_compression, 1.0)
        if candidate.zero_stage == 0:
            return self._over_data("all_reduce", size * ratio, candidate.data, candidate.data)
        groups = candidate.data // candidate.shards
        among_groups = self._over_data("all_reduce", size / candidate.shards * ratio, groups, candidate.data)
        return self._over_data("reduce_scatter", size * ratio, candidate.shards, candidate.shards) + among_groups

    def gather(self) -> float:
        """The parameters, once."""
        size = self.step.parameter_bytes * COMPRESSED.get(self.candidate.parameter_compression, 1.0)
        return self._over_data("all_gather", size, self.candidate.shards, self.candidate.shards)

    def tensor(self, microbatches: int) -> float:
        if self.candidate.tensor == 1:
            return 0.0
        link = self._link(self.candidate.tensor)
        known = self.hardware.collective_seconds
        start = known("all_reduce", 0.0, self.candidate.tensor, link)
        bytes_each = known("all_reduce", 1e6, self.candidate.tensor, link) - start
        factor = 2 * (self.candidate.tensor - 1) / self.candidate.tensor
        once = self.step.tensor_messages * start + self.step.tensor_bytes / factor * bytes_each / 1e6
        return once * (1 + self.step.recomputed / 2) * microbatches

    def message(self, size: float) -> float:
        """From one stage to the next."""
        return self.hardware.collective_seconds("send", size, 2, self._link(self.candidate.tensor * 2))

    def _over_data(self, name: str, size: float, ranks: int, span: int) -> float:
        """All messages of one kind together, among `ranks` of `span` data ranks; tensor and pipe ranks lie between them."""
        if ranks == 1 or size == 0:
            return 0.0
        count = max(1, self.step.messages)
        link = self._link(span * self.candidate.tensor * self.candidate.pipeline)
        return count * self.hardware.collective_seconds(name, size / count, ranks, link)

    def _link(self, span: int) -> str:
        """Returns which link a group uses that is spread over `span` neighbouring devices."""
        if span > self.devices_per_host:
            return "between"
        return "staged" if self.candidate.pipeline > 1 else "within"
