"""Plans of faults: what is done to a job, by whom, at a moment that a seed chooses. The table of them is in `table.py`."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.soak.jobs import Job

# Of each worker of the undisturbed run: its marks, and the seconds from each to the next or to the end.
Phases = dict[int, list[tuple[str, float]]]
Planned = list[dict[str, Any]]
Plan = Callable[[random.Random, Job, Phases], Planned]
Moment = Callable[[random.Random, Phases, int], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is done to a job, and what must come of it.

    Attributes:
        name: what `--only` takes.
        what: the fault in the words of the documentation.
        plan: returns what is done, by whom and when; see `inside.py` and `outside.py`.
        jobs: what it is done to.
        ends: "same": the job ends with the numbers of the undisturbed run; "fails": with an exit code that is not 0.
        code: what the exit code must be; None: anything that fits `ends`.
        says: a pattern that the output of every worker must have that the fault did not hit, "{victim}" being the one that it
            hit ("worker 1"); "": none.
        says_itself: the same, for the one that it hit.
        launcher_says: the same, for the launcher.
        needs_root: whether it does.
        seconds: from the fault to the end of all workers of the attempt, at most.
        needs_strike: whether it is committed at a moment, and is not the way in which the job is started.
        repeats: how many steps may be done again, at most; None: any.
    """

    name: str
    what: str
    plan: Callable[[random.Random, Job, Phases], Planned]
    jobs: Sequence[Job]
    ends: str = "same"
    code: int | None = None
    says: str = ""
    says_itself: str = ""
    launcher_says: str = ""
    needs_root: bool = False
    seconds: float = 60.0
    needs_strike: bool = True
    repeats: int | None = None


def at_random(rng: random.Random, phases: Phases, worker: int) -> dict[str, Any]:
    """A moment in the life of `worker`: every phase is as likely, and every moment in it."""
    mark, seconds = rng.choice(phases[worker])
    return {"worker": worker, "mark": mark, "delay": rng.random() * seconds}


def in_training(rng: random.Random, phases: Phases, worker: int) -> dict[str, Any]:
    epochs = [(mark, seconds) for mark, seconds in phases[worker] if mark.startswith("epoch ")]
    return at_random(rng, {worker: epochs}, worker)


def before_the_end(rng: random.Random, phases: Phases, worker: int) -> dict[str, Any]:
    """A moment at which the others need `worker` still: before the last two marks, "saved" and "end"."""
    return at_random(rng, {worker: phases[worker][:-2]}, worker)


def outside(act: str, moment: Moment = at_random, **more: Any) -> Plan:
    """Returns the plan of an act from outside on a worker of the first attempt, at a moment."""

    def plan(rng: random.Random, job: Job, phases: Phases) -> Planned:
        return [{"act": act, "attempt": 0, "with": more, **moment(rng, phases, rng.randrange(job.workers))}]

    return plan


def inside(act: str, at: str, *, worker: int | None = -1, steps: tuple[int, int] = (1, 20), **more: Any) -> Plan:
    """Returns the plan of an act that a worker commits itself, in every attempt if it is one of the rows of data.

    Args:
        worker: who; -1: any.
        steps: the first and the last of the steps of which one is chosen, where `at` is of steps or data.
    """

    def plan(rng: random.Random, job: Job, phases: Phases) -> Planned:
        who = rng.randrange(job.workers) if worker == -1 else worker
        number = rng.randint(*steps) if at in ("step", "save", "data", "data ends") else 0
        return [{"act": act, "at": at, "number": number, "attempt": 0, "worker": who, "with": more}]

    return plan


def kills(times: int) -> Plan:
    """Returns the plan of a SIGKILL in each of so many attempts, at a random moment of the training that is left."""

    def plan(rng: random.Random, job: Job, phases: Phases) -> Planned:
        found = [at_random(rng, phases, rng.randrange(job.workers)) for _ in range(times)]
        marks = [mark for mark, _ in phases[0]]
        # Marks of epochs do not come again once an epoch is done; those of the start come in each attempt.
        late = iter(sorted((at for at in found if _is_late(at)), key=lambda at: (marks.index(at["mark"]), at["delay"])))
        return [{"act": "kill", "attempt": number, **(next(late) if _is_late(at) else at)} for number, at in enumerate(found)]

    return plan


def _is_late(at: dict[str, Any]) -> bool:
    return at["mark"] not in ("started", "start", "imported", "connected", "built")


def both(*plans: Plan) -> Plan:
    return lambda rng, job, phases: [planned for plan in plans for planned in plan(rng, job, phases)]


def in_second_attempt(plan: Plan, mark: str = "") -> Plan:
    """The same, when the job has been started again; at a random moment behind `mark`, if it is given."""

    def again(rng: random.Random, job: Job, phases: Phases) -> Planned:
        late = {"mark": mark, "delay": rng.random()} if mark else {}
        return [{**planned, "attempt": 1, **late} for planned in plan(rng, job, phases)]

    return again


def cut(do: str, moment: Moment = in_training, **more: Any) -> Plan:
    """Something is done to the cable between two hosts: see `hosts.Cable`."""

    def plan(rng: random.Random, job: Job, phases: Phases) -> Planned:
        return [{"act": "cable", "attempt": 0, "with": {"do": do, "host": rng.randrange(2), **more}, **moment(rng, phases, 0)}]

    return plan


def wrong_config(worker: int | None = 1, **how: Any) -> Plan:
    """A worker's TF_CONFIG is changed; None: that of all."""
    return lambda rng, job, phases: [{"act": "wrong_config", "attempt": 0, "worker": worker, "with": how}]


def around(act: str, worker: int = 1) -> Plan:
    """Something is wrong when the job starts: a worker is "absent", or there is a "port_in_use"."""
    return lambda rng, job, phases: [{"act": act, "attempt": 0, "worker": worker}]


def at_mark(mark: str, seconds: float = 0.0) -> Moment:
    return lambda rng, phases, worker: {"worker": worker, "mark": mark, "delay": seconds * rng.random()}


NOTHING: Plan = lambda rng, job, phases: []  # noqa: E731
