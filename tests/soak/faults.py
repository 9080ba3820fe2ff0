"""The faults, with what has to come of each: a row of the table is a fault of a job, at a moment that a seed chooses."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.soak.jobs import Job, grid

# Of each worker of the undisturbed run: its marks, and the seconds from each to the next or to the end.
Phases = dict[int, list[tuple[str, float]]]
Planned = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is done to a job, and what must come of it.

    Attributes:
        name: what `--only` takes.
        plan: returns what is done, by whom and when; see `inside.py` and `outside.py`.
        jobs: what it is done to.
        ends: "same": the job ends with the numbers of the undisturbed run; "fails": with an exit code that is not 0.
        code: what the exit code must be; None: anything that fits `ends`.
        says: a pattern that the output of each worker must have that was not killed; "": none.
        needs: "root" or "hosts", where the fault needs them.
        seconds: from the fault to the end of all workers of the attempt, at most.
    """

    name: str
    plan: Callable[[random.Random, Job, Phases], Planned]
    jobs: Sequence[Job]
    ends: str = "same"
    code: int | None = None
    says: str = ""
    needs: str = ""
    seconds: float = 60.0
    needs_strike: bool = True  # whether it is committed at a moment, and not the way in which the job is started


def at_random(rng: random.Random, phases: Phases, worker: int) -> dict[str, Any]:
    """A moment in the life of `worker`: every phase is as likely, and every moment in it."""
    mark, seconds = rng.choice(phases[worker])
    return {"worker": worker, "mark": mark, "delay": rng.random() * seconds}


def in_training(rng: random.Random, phases: Phases, worker: int) -> dict[str, Any]:
    epochs = [(mark, seconds) for mark, seconds in phases[worker] if mark.startswith("epoch ")]
    return at_random(rng, {worker: epochs}, worker)


def _victim(rng: random.Random, job: Job) -> int:
    return rng.randrange(job.workers)


def _kill(rng: random.Random, job: Job, phases: Phases) -> Planned:
    return [{"act": "kill", "attempt": 0, **at_random(rng, phases, _victim(rng, job))}]


def _kill_twice(rng: random.Random, job: Job, phases: Phases) -> Planned:
    return [
        {"act": "kill", "attempt": attempt, **in_training(rng, phases, _victim(rng, job)), **more}
        for attempt, more in enumerate(({}, {"mark": "built", "delay": rng.random()}))
    ]


def _kill_all(rng: random.Random, job: Job, phases: Phases) -> Planned:
    return [{"act": "kill_all", "attempt": 0, **at_random(rng, phases, _victim(rng, job))}]


def _stop(rng: random.Random, job: Job, phases: Phases) -> Planned:
    return [{"act": "stop", "attempt": 0, "with": {"seconds": 5}, **at_random(rng, phases, _victim(rng, job))}]


_FIT = Job()
_RUN_NO_RESTART = Job(max_restarts=0)

FAULTS = [
    Fault("kill", _kill, [*grid(launch="fork"), *grid(), Job(loop="own"), Job("tensor", loop="own"), Job(save_freq=4)]),
    Fault("kill_twice", _kill_twice, [Job(launch="fork"), Job("pipeline", launch="fork"), Job(launch="fork", save_freq=4)]),
    Fault("kill_all", _kill_all, [Job(launch="fork"), Job(launch="plain")]),
    Fault("stop_for_5_s", _stop, [Job(launch="fork"), Job("tensor", launch="fork"), Job("pipeline", launch="fork")]),
]
