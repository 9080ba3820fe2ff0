"""The messages of a schedule, and one order for all of them: for transports whose messages wait for each other.

On GPUs a device runs one message at a time, in the order in which it was given them, and each holds it until its other side has
come. Two ranks that have the same two messages in different orders wait for ever, and so do ranks in a circle:

    1f1b     rank 0   0F0 0F1 [1B0] 0B0 0F2 ...        each rank would send before it receives: rank 0 the second F, rank 1
             rank 1   1F0 1B0 [0F1] 1F1 1B1 ...        the first B

So all ranks take their messages, and what they do between them, from one sequence, in which everything stands at its time in a
simulation of the schedule: an action at its start, a message at the end of the action that makes it. Each rank's part of one
sequence cannot contradict another's.
"""

import dataclasses

from tfdist.extensions.pipeline.schedules.actions import Action
from tfdist.extensions.pipeline.schedules.dataflow import earliest_starts, inputs_of
from tfdist.extensions.pipeline.schedules.schedule import Schedule
from tfdist.extensions.pipeline.schedules.simulation import DURATIONS


@dataclasses.dataclass(frozen=True)
class Message:
    """What `source` makes, on its way to the rank of `taker`, which begins with it."""

    source: Action
    taker: Action


def events(schedule: Schedule, rank: int) -> list[Action | Message]:
    """Returns the actions of `rank` and the messages that it sends and receives, in the order that suits all ranks.

    A message comes after its source and before its taker.
    """
    starts = earliest_starts(schedule.orders, DURATIONS)
    found: list[tuple[tuple[float, int, str], Action | Message]] = []
    for action in starts:
        here = schedule.rank_of(action.stage_index)
        if here == rank:
            found.append(((starts[action], 1, ""), action))
        for source in inputs_of(action, starts):
            there = schedule.rank_of(source.stage_index)
            if here != there and rank in (here, there):
                end = starts[source] + DURATIONS[source.phase]
                # Of one moment, messages come first: an action may begin with them. Among them any order will do that is one.
                found.append(((end, 0, str(source)), Message(source, action)))
    return [event for _, event in sorted(found, key=lambda entry: entry[0])]
