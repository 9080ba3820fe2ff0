"""Every way to spread a model over some devices, and those among them that fit, fastest first."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from tfdist import errors
from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.device_memory import DeviceMemory
from tfdist.tools.planning.dry_run import DryRun
from tfdist.tools.planning.step_time import StepTime

SCHEDULES = ("1f1b", "gpipe", "zero_bubble", "interleaved")
# More microbatches for each stage than so many shorten the bubble by little.
_MICROBATCHES_PER_STAGE = 8
# Planned times that differ by less than this part are alike: they are not exact to it.
_ALIKE = 0.05
# After so many plans that a dry run has refuted the next one stands unconfirmed.
_TRIES = 4


@dataclasses.dataclass(frozen=True)
class Estimated:
    """A candidate and what is expected of it.

    Attributes:
        candidate: the candidate.
        memory: of the fullest device.
        limit: bytes that a device has.
        time: of a step; None: not estimated, because it does not fit.
        dry_run: what the plan's strategy itself has traced; None: nothing.
    """

    candidate: Candidate
    memory: DeviceMemory
    limit: float
    time: StepTime | None = None
    dry_run: DryRun | None = None

    @property
    def device_memory(self) -> DeviceMemory:
        """The memory that decides: the memory that a dry run has found, or the planned memory."""
        return self.memory if self.dry_run is None or self.dry_run.failure else self.dry_run.memory

    @property
    def is_refused(self) -> bool:
        """Whether its strategy, asked in a dry run, refuses it."""
        return self.dry_run is not None and bool(self.dry_run.refusal)

    @property
    def fits(self) -> bool:
        return not self.is_refused and self.device_memory.together <= self.limit

    @property
    def missing_bytes(self) -> float:
        """By how much it does not fit."""
        return max(0.0, self.device_memory.together - self.limit)


@dataclasses.dataclass(frozen=True)
class Choices:
    """The candidates that are enumerated.

    Attributes:
        devices: how many there are; all of them are used.
        batch_size: global, in examples.
        zero_stages: the stages.
        tensor_sizes: how many tensor ranks the model can be sharded over, 1 among them.
        pipeline_sizes: how many stages it can be cut in, 1 among them.
        schedules: of pipelines.
        recompute: whether recomputation is tried: False where there are no blocks.
        sharding_group_sizes: of hybrid sharding.
        gradient_compressions: names, and None.
        parameter_compressions: names, and None; they are for stage 3.
        stages_per_rank: of the schedule "interleaved".
        most_stages: how many stages the model can be cut in.
    """

    devices: int
    batch_size: int
    zero_stages: Sequence[int] = (0, 1, 2, 3)
    tensor_sizes: Sequence[int] = (1,)
    pipeline_sizes: Sequence[int] = (1,)
    schedules: Sequence[str] = SCHEDULES
    recompute: bool = True
    sharding_group_sizes: Sequence[int] = ()
    gradient_compressions: Sequence[str | None] = (None,)
    parameter_compressions: Sequence[str | None] = (None,)
    stages_per_rank: Sequence[int] = (2,)
    most_stages: float = math.inf

    def candidates(self) -> Iterator[Candidate]:
        """Yields every candidate whose sizes divide the devices and the batch.

        With one replica all stages are one, and stand as 0.
        """
        for tensor, pipeline in itertools.product(self.tensor_sizes, self.pipeline_sizes):
            data, left = divmod(self.devices, tensor * pipeline)
            if left == 0 and self.batch_size % data == 0:
                for cut in self._cuts(pipeline, self.batch_size // data):
                    yield from self._sharded(data, tensor, pipeline, cut)

    def _cuts(self, pipeline: int, rows: int) -> Iterator[tuple[str | None, int, int]]:
        """Yields schedules, numbers of microbatches and of stages a rank, for a replica with so many rows."""
        if pipeline == 1:
            yield None, 1, 1
            return
        for count in range(pipeline, min(rows, pipeline * _MICROBATCHES_PER_STAGE) + 1):
            for schedule in self.schedules if rows % count == 0 else ():
                for stages in self.stages_per_rank if schedule == "interleaved" else (1,):
                    if pipeline * stages <= self.most_stages:
                        yield schedule, count, stages

    def _sharded(self, data: int, tensor: int, pipeline: int, cut: tuple[str | None, int, int]) -> Iterator[Candidate]:
        schedule, microbatches, stages = cut
        again = (False, True) if self.recompute else (False,)
        gradients = self.gradient_compressions if data > 1 else (None,)
        for zero_stage in self.zero_stages if data > 1 else self.zero_stages[:1]:
            groups = [size for size in self.sharding_group_sizes if 1 < size < data and data % size == 0] if zero_stage else []
            parameters = self.parameter_compressions if data > 1 and zero_stage == 3 else (None,)
            for recompute, group, gradient, parameter in itertools.product(again, (None, *groups), gradients, parameters):
                yield Candidate(
                    zero_stage=zero_stage,
                    data=data,
                    tensor=tensor,
                    pipeline=pipeline,
                    schedule=schedule,
                    microbatches=microbatches,
                    recompute=recompute,
                    sharding_group_size=group,
                    gradient_compression=gradient,
                    parameter_compression=parameter,
                    stages_per_rank=stages,
                )


def search(
    choices: Choices,
    limit: float,
    memory_of: Callable[[Candidate], DeviceMemory],
    time_of: Callable[[Candidate], StepTime],
) -> list[Estimated]:
    """Returns all candidates in the order of `ranked`; `time_of` is asked for those that fit in `limit` bytes of a device.

    Raises:
        ValueError: no sizes divide both devices and batch.
    """
    found = []
    for candidate in choices.candidates():
        one = Estimated(candidate, memory_of(candidate), limit)
        found.append(dataclasses.replace(one, time=time_of(candidate)) if one.fits else one)
    if not found:
        raise errors.value_error(
            f"`batch_size` must be one that a plan divides: over {choices.devices} devices it is divided among the replicas, and "
            "those of a pipeline divide theirs in microbatches, as many as there are stages or more.",
            batch_size=choices.batch_size,
            fix=f"Take {_nearest(choices)}, or another number of devices.",
        )
    return ranked(found)


def ranked(found: Sequence[Estimated]) -> list[Estimated]:
    """Returns candidates in order: those that fit, the fastest first, then the others, that first which lacks least.

    Of those that are as fast as the fastest by as much as times can be told, the one with the fewest means comes first.
    """
    order = sorted(found, key=_rank)
    if order and order[0].fits and order[0].time is not None:
        limit = (1 + _ALIKE) * order[0].time.together
        alike = [one for one in order if one.fits and one.time is not None and one.time.together <= limit]
        first = min(alike, key=_means)
        order = [first, *(one for one in order if one is not first)]
    return order


def with_best_confirmed(
    found: Sequence[Estimated], run: Callable[[Candidate, float], DryRun], tell: Callable[[str], object]
) -> list[Estimated]:
    """Returns the plans, the best of which a dry run has confirmed: what one refutes is not among those that fit any more.

    `run` makes the dry run of a candidate, for devices of so many bytes; `tell` is given a line for each.
    """
    plans = list(found)
    for _ in range(_TRIES):
        best = plans[0]
        if not best.fits or best.dry_run is not None:
            break
        tell(f"confirming {best.candidate.name()} by a dry run")
        plans = ranked([dataclasses.replace(best, dry_run=run(best.candidate, best.limit)), *plans[1:]])
    return plans


def _means(one: Estimated) -> tuple[int, ...]:
    """Returns how many means a candidate takes, the most involved ones first."""
    candidate = one.candidate
    compressions = (candidate.gradient_compression, candidate.parameter_compression)
    is_compressed = sum(name is not None for name in compressions)
    return candidate.stages, is_compressed, candidate.tensor, candidate.recompute, candidate.microbatches


def _nearest(choices: Choices) -> int:
    """Returns the batch nearest to that of `choices` that some candidate divides: all devices being replicas, one does."""
    for distance in range(1, choices.devices + 1):
        for size in (choices.batch_size - distance, choices.batch_size + distance):
            if size > 0 and any(dataclasses.replace(choices, batch_size=size).candidates()):
                return size
    return choices.devices


def _rank(one: Estimated) -> tuple[int, float, float]:
    order = one.time.together if one.fits and one.time is not None else one.missing_bytes
    return (int(not one.fits) + one.is_refused, order, one.device_memory.together)


def divisors(number: int) -> list[int]:
    """Returns what divides a positive integer, in increasing order."""
    return [one for one in range(1, number + 1) if number % one == 0]
