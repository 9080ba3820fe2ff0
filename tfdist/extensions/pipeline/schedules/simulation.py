"""When every action of a schedule runs, how long ranks idle and what they hold: the arithmetic of a pipeline, without one."""

import dataclasses
import math
from collections.abc import Mapping

from tfdist import errors
from tfdist.extensions.pipeline.schedules.actions import Action, Phase
from tfdist.extensions.pipeline.schedules.dataflow import earliest_starts, held_activations
from tfdist.extensions.pipeline.schedules.schedule import Schedule

DURATIONS = {Phase.FORWARD: 1.0, Phase.BACKWARD: 2.0, Phase.BACKWARD_INPUT: 1.0, Phase.BACKWARD_WEIGHT: 1.0}


@dataclasses.dataclass(frozen=True)
class Span:
    """An action and the time that it took on its rank, [start, end), in any unit."""

    rank: int
    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A schedule and when its actions run.

    Attributes:
        schedule: the schedule.
        spans: its actions with their times, simulated or measured, in the order of their starts.
    """

    schedule: Schedule
    spans: list[Span]

    @property
    def total_time(self) -> float:
        """The time from the first start to the last end."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """Idle time / busy time, over all ranks: by how much the step takes longer than without any waiting."""
        busy = sum(span.end - span.start for span in self.spans)
        return (self.total_time * self.schedule.num_ranks - busy) / busy

    def peak_in_flight(self, rank: int) -> int:
        """Returns of how many (stage, microbatch) `rank` holds activations at most: it holds them from F to the end of B or W."""
        return max(held_activations(self.schedule.actions(rank)))

    def peak_microbatches(self, rank: int) -> float:
        """Returns `peak_in_flight` in microbatches of all stages of the rank: one stage is 1 / `stages_per_rank` of it."""
        return self.peak_in_flight(rank) / self.schedule.stages_per_rank


def simulate(schedule: Schedule, durations: Mapping[Phase, float] | None = None, transfer: float = 0.0) -> Simulation:
    """Computes when the actions of a schedule run if every rank runs its own in order, each as soon as its inputs are there.

    The slots of the schedule's table do not matter.

    Args:
        schedule: the schedule.
        durations: the time that each phase takes on a stage, in any unit; a phase that is not there takes F 1, B 2, I 1, W 1.
        transfer: the time that a result takes to another rank, in the same unit. A transfer keeps neither rank busy.

    Returns:
        The times, and with them `total_time`, `bubble_fraction`, `peak_in_flight(rank)` and `peak_microbatches(rank)`.

    Raises:
        ValueError: a duration is not positive, `transfer` is negative, or one of them is not finite.
    """
    durations = {**DURATIONS, **(durations or {})}
    for phase, duration in durations.items():
        if not isinstance(phase, Phase) or not 0 < duration < math.inf:
            raise errors.value_error("`durations` must map phases to positive times.", phase=phase, duration=duration)
    if not 0 <= transfer < math.inf:
        raise errors.value_error("`transfer` must be a time of at least 0.", transfer=transfer)
    starts = earliest_starts(schedule.orders, durations, transfer)
    spans = [
        Span(schedule.rank_of(action.stage_index), action, start, start + durations[action.phase])
        for action, start in starts.items()
    ]
    return Simulation(schedule, sorted(spans, key=lambda span: (span.start, span.rank)))
