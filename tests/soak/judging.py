"""Compares a disturbed run with the undisturbed one, bit by bit, and says what does not hold."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

import numpy as np

from tests.soak import marks
from tests.soak.faults import Fault
from tests.soak.outside import OF_ALL
from tests.soak.running import Run

MISSED = "the fault's moment did not come: the job was quicker than the undisturbed one"
_OVER = ("saved", "end")  # marks at which no worker needs another one any more
_SAID = re.compile(r"^(tfdist: .*|\w+(?:\.\w+)*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)


@dataclasses.dataclass
class Row:
    """A row of the table."""

    fault: str
    job: str
    seed: int
    done: list[str] = dataclasses.field(default_factory=list)  # the faults, with their moments
    exit_code: int | None = None
    codes: list[list[int | None]] = dataclasses.field(default_factory=list)  # by attempt and worker, without a launcher
    attempts: int = 1
    seconds: float | None = None  # from the first fault to the end of all workers of its attempt
    repeated: int = 0  # steps that an attempt did again
    problems: list[str] = dataclasses.field(default_factory=list)  # what does not hold; none: the row holds
    said: str = ""  # the last of the first words of a worker that was not the victim

    @property
    def holds(self) -> bool:
        return not self.problems

    @property
    def verdict(self) -> str:
        return "holds" if self.holds else "missed" if self.problems == [MISSED] else "FAILS"


def judge(fault: Fault, seed: int, run: Run, reference: pathlib.Path) -> Row:
    outcome = run.outcome
    left = [f"left behind: {', '.join(outcome.left)}"] if outcome.left else []
    problems = list(left)
    if outcome.timed_out:
        problems.append("did not end: the driver ended it")
    seconds = [strike.seconds for strike in outcome.strikes if strike.seconds is not None]
    if seconds and max(seconds) > fault.seconds and not (fault.ends == "same" and outcome.attempts == 1):
        problems.append(f"took {max(seconds):.0f} s")
    if not outcome.strikes and fault.needs_strike:
        problems.append(MISSED)
    if fault.ends == "same":
        problems += [f"exit code {outcome.exit_code}"] if outcome.exit_code != 0 else differences(run.folder, reference)
    elif outcome.exit_code == 0 and fault.ends == "fails":
        problems.append("exit code 0")
    if fault.code is not None and outcome.exit_code != fault.code:
        problems.append(f"exit code {outcome.exit_code}, not {fault.code}")
    victims = {(strike.attempt, strike.worker) for strike in outcome.strikes if strike.act not in OF_ALL}
    first = {worker: text for (attempt, worker), text in outcome.outputs.items() if attempt == 0}
    victim = f"worker {min(victims)[1]}" if victims else ""
    others = {worker: text for worker, text in first.items() if (0, worker) not in victims}
    heard = [(f"worker {worker}", text, fault.says) for worker, text in others.items()]
    heard += [(f"worker {worker}", text, fault.says_itself) for worker, text in first.items() if worker not in others]
    heard += [("the launcher", outcome.outputs.get((-1, -1), ""), fault.launcher_says)]
    for who, text, pattern in heard:
        if pattern and not re.search(pattern.replace("{victim}", victim), text):
            problems.append(f"{who} does not say {pattern!r}")
    said = [found[-1] for text in others.values() if (found := _SAID.findall(text))]
    steps = [{name for name, _ in found if name.startswith("step ")} for found in _logged(run.folder).values()]
    repeated = sum(map(len, steps)) - len(set().union(*steps))
    if fault.repeats is not None and repeated > fault.repeats:
        problems.append(f"{repeated} steps were done again")
    is_late = bool(outcome.strikes) and all(strike.mark in _OVER for strike in outcome.strikes)
    if fault.ends == "fails" and outcome.exit_code == 0 and is_late:
        problems = [*left, MISSED]
    return Row(
        fault=fault.name,
        job=run.job.name,
        seed=seed,
        done=[str(strike) for strike in outcome.strikes],
        exit_code=outcome.exit_code,
        codes=outcome.codes,
        attempts=outcome.attempts,
        seconds=round(seconds[0], 1) if seconds else None,
        repeated=repeated,
        problems=problems,
        said=said[0] if said else "",
    )


def _logged(folder: pathlib.Path) -> dict[tuple[int, int], list[Any]]:
    """Returns what the chief has logged, by attempt."""
    return {key: found for key, found in marks.read_all(folder, "losses").items() if key[1] == 0}


def differences(folder: pathlib.Path, reference: pathlib.Path) -> list[str]:
    """Returns what differs in the weights, the optimizer's state and everything that was logged."""
    expected = dict(map(tuple, marks.read(reference, "losses", 0, 0)))
    found: list[str] = []
    for (attempt, worker), lines in marks.read_all(folder, "losses").items():
        wrong = [name for name, value in lines if value != expected.get(name)]
        if wrong:
            name, value = next(line for line in lines if line[0] == wrong[0])
            found.append(f"{len(wrong)} logs of worker {worker} in attempt {attempt}: {name} {value}, not {expected.get(name)}")
    missing = set(expected) - {name for lines in _logged(folder).values() for name, _ in lines}
    found += [f"{len(missing)} steps or epochs were never logged: {min(missing)}"] if missing else []
    if not (folder / "result.npz").exists():
        return [*found, "no result was written"]
    with np.load(folder / "result.npz") as ours, np.load(reference / "result.npz") as theirs:
        if ours.files != theirs.files:
            return [*found, f"{len(ours.files)} variables, not {len(theirs.files)}"]
        pairs = [(name, ours[name], theirs[name]) for name in ours.files]
    wrong = [(name, a, b) for name, a, b in pairs if a.tobytes() != b.tobytes()]
    if wrong:
        largest = max(float(np.abs(a.astype("float64") - b.astype("float64")).max()) for _, a, b in wrong)
        found.append(f"{len(wrong)} of {len(pairs)} variables differ, by up to {largest:.2g}")
    return found
