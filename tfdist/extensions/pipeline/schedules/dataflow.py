"""The inputs that each action of a pipeline waits for, when it can start, and the memory of its rank meanwhile.

    F(s, m)         after F(s-1, m)
    B or I (s, m)   after F(s, m), and after B or I (s+1, m)
    W(s, m)         after I(s, m)

(phase F, B, I or W of stage s for microbatch m), and every action after the action before it on its rank.
"""

import functools
from collections import deque
from collections.abc import Container, Iterable, Mapping

from tfdist.extensions.pipeline.schedules.actions import Action, Phase

_AFTER_BACKWARD = ((0, Phase.FORWARD), (1, Phase.BACKWARD), (1, Phase.BACKWARD_INPUT))

# The actions whose results a phase needs, where the schedule has them: (stage relative to the phase's own, phase).
_INPUTS = {
    Phase.FORWARD: ((-1, Phase.FORWARD),),
    Phase.BACKWARD: _AFTER_BACKWARD,
    Phase.BACKWARD_INPUT: _AFTER_BACKWARD,
    Phase.BACKWARD_WEIGHT: ((0, Phase.BACKWARD_INPUT),),
}

ONE_SLOT = dict.fromkeys(Phase, 1)


def inputs_of(action: Action, actions: Container[Action]) -> list[Action]:
    """Returns the actions whose results `action` needs, of all the `actions` of a schedule."""
    return [needed for needed in _before(action) if needed in actions]


@functools.lru_cache(maxsize=2**16)
def _before(action: Action) -> tuple[Action, ...]:
    """Returns the actions whose results `action` needs, where they are there."""
    return tuple(
        Action(action.stage_index + offset, phase, action.microbatch)
        for offset, phase in _INPUTS[action.phase]
        if action.stage_index + offset >= 0
    )


def earliest_starts(
    orders: Mapping[int, Iterable[Action]], durations: Mapping[Phase, float] = ONE_SLOT, transfer: float = 0
) -> dict[Action, float]:
    """Returns when each action starts if every rank runs its actions in order, each as soon as its inputs are there.

    In the result an action comes after those it waits for. Actions that wait for each other in a circle, and those after them,
    are missing. `transfer` is the time from the end of an action to the arrival of its result on another rank.
    """
    waiting = {rank: deque(actions) for rank, actions in orders.items()}
    rank_of = {action: rank for rank, actions in waiting.items() for action in actions}
    free: dict[int, float] = dict.fromkeys(waiting, 0)
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    found = True
    while found:
        found = False
        for rank, actions in waiting.items():
            while actions:
                action = actions[0]
                inputs = inputs_of(action, rank_of)
                if not all(needed in ends for needed in inputs):
                    break
                arrivals = [ends[needed] + (transfer if rank_of[needed] != rank else 0) for needed in inputs]
                starts[action] = max([free[rank], *arrivals])
                ends[action] = free[rank] = starts[action] + durations[action.phase]
                actions.popleft()
                found = True
    return starts


def held_activations(actions: Iterable[Action]) -> list[int]:
    """Returns, for each of a rank's actions, of how many (stage, microbatch) the rank holds activations while the action runs."""
    held, counts = 0, []
    for action in actions:
        held += action.phase is Phase.FORWARD
        counts.append(held)
        held -= action.phase in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT)
    return counts
