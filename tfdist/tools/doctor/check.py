"""A check, and what comes of it."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any


class Status(enum.StrEnum):
    """How a check has ended. Only `FAILS` and `ERROR` make the doctor's exit code 1."""

    HOLDS = "holds"
    FAILS = "fails"  # it ran, and found something that must not be
    ERROR = "error"  # it raised, crashed or hung
    LEFT_OUT = "left out"  # it does not apply here, for a reason that is told

    @property
    def is_bad(self) -> bool:
        return self in (Status.FAILS, Status.ERROR)


class LeftOutError(Exception):
    """Raised by a check that does not apply to these devices; its text is the reason."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The finding of a check."""

    summary: str  # a line for the reader
    data: dict[str, Any] = dataclasses.field(default_factory=dict)  # the figures, what JSON can carry
    holds: bool = True  # False when it found something that must not be


@dataclasses.dataclass(frozen=True)
class Check:
    """Something to find out about this machine."""

    name: str  # "part/what", such as "parity/zero_stage_3", or the part alone
    run: Callable[[Any], Finding]  # called with the `Session` of its process, or whatever the caller gives to all checks
    is_needed: bool = False  # without it nothing that stands after it can run


@dataclasses.dataclass(frozen=True)
class Result:
    """How a check has ended on one worker."""

    name: str
    status: Status
    summary: str  # the line of the finding, the reason why it was left out, or the error
    seconds: float
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    log: tuple[str, ...] = ()  # the last lines that the process has printed, of an error

    def to_json(self) -> dict[str, Any]:
        """Returns the result as what JSON can carry."""
        found = {**dataclasses.asdict(self), "seconds": round(self.seconds, 3), "log": list(self.log)}
        return {name: value for name, value in found.items() if value or name not in ("data", "log")}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Result":
        """Returns the result that `to_json` has made `found` of."""
        return cls(**{**found, "status": Status(found["status"]), "log": tuple(found.get("log", ()))})


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a check has ended on all workers; `results` are in worker order."""

    results: "tuple[Result, ...]"

    @property
    def name(self) -> str:
        return self.results[0].name

    @property
    def status(self) -> Status:
        """The worst of the workers'."""
        order = (Status.ERROR, Status.FAILS, Status.HOLDS, Status.LEFT_OUT)
        return min((result.status for result in self.results), key=order.index)

    @property
    def chief(self) -> "Result":
        return self.results[0]

    @property
    def summary(self) -> str:
        """The chief's line, or those of the workers on which it went wrong."""
        bad = [(index, result) for index, result in enumerate(self.results) if result.status.is_bad]
        if not bad or len(self.results) == 1:
            return self.chief.summary
        return "; ".join(f"worker {index}: {result.summary}" for index, result in bad)

    def to_json(self) -> dict[str, Any]:
        """Returns the outcome as what JSON can carry."""
        return {"name": self.name, "status": self.status, "workers": [result.to_json() for result in self.results]}
