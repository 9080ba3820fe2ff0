"""The records of `benchmarks.run`: JSON lines with which a run that was cut short goes on. Imports no TensorFlow.

    {"conditions": {"commit": "1a2b3c4", "tensorflow": "2.21.0", ...}}
    {"kind": "speed", "model": "small", "contender": "zero3", "ranks": 2, ..., "tokens_per_second": 5231.0}

A line is written when its case is done. A last line without an end is one that a program was writing when it died: it is dropped.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from typing import Any

from benchmarks.suites import Measure

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_MEASURED = ("tfdist", "benchmarks")  # a change of other files changes no figure

Record = dict[str, Any]


class ConditionsError(ValueError):
    """The folder's records are of another machine, version or commit."""


class BrokenFileError(ValueError):
    """A line is no record, and it is not the last."""


def conditions(peers: dict[str, str | None]) -> dict[str, Any]:
    """Returns what must not change between records that are compared.

    Args:
        peers: versions of PyTorch's packages; None where one is not there, or not needed.
    """
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "tensorflow": importlib.metadata.version("tensorflow"),
        "keras": importlib.metadata.version("keras"),
        **peers,
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
    }


def _commit() -> str | None:
    """Returns the last commit that changed what is measured, "+" behind it where files differ; None outside of a checkout."""
    git = ["git", "-C", str(_ROOT)]
    try:
        found = subprocess.run([*git, "log", "-1", "--format=%h", "--", *_MEASURED], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain", "--", *_MEASURED], capture_output=True, text=True)
    except OSError:  # no git
        return None
    commit = found.stdout.strip()
    return (commit + ("+" if changed.stdout.strip() else "")) if commit else None


def _processor() -> str | None:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def key_of(measure: Measure, environment: dict[str, str]) -> Record:
    """Returns the fields of a record that say what was measured: records that have the same are the same measurement.

    Of a library to preload the name is kept, not the folder.
    """
    shown = {name: pathlib.PurePath(value).name if name == "LD_PRELOAD" else value for name, value in environment.items()}
    return {**dataclasses.asdict(measure), "environment": shown}


class Results:
    """The records of one folder.

    Args:
        file: may not exist yet.
        current: the conditions of this run, see `conditions`.

    Raises:
        ConditionsError: what the file has was measured under others. A condition that was None on one side is no other.
        BrokenFileError: it is no such file.
    """

    def __init__(self, file: pathlib.Path, current: dict[str, Any]):
        self._file = file
        self._records: dict[str, Record] = {}  # by key, the last one
        before: dict[str, Any] = {}
        for line in self._read():
            if "conditions" in line:
                before |= {name: value for name, value in line["conditions"].items() if value is not None}
            else:
                self._records[_text(_key_in(line))] = line
        changed = {name for name in before if current.get(name) not in (None, before[name])}
        if changed:
            list_of = ", ".join(f"{name} {before[name]} (now {current[name]})" for name in sorted(changed))
            raise ConditionsError(f"{file.parent.name} has records of {list_of}")
        if any(value is not None and name not in before for name, value in current.items()):
            self._write({"conditions": current})

    def get(self, key: Record) -> Record | None:
        """Returns the last record of a measurement."""
        return self._records.get(_text(key))

    def is_done(self, key: Record) -> bool:
        """Returns whether there is a record of the measurement that is neither a failure nor says that a peer is missing."""
        record = self.get(key)
        return record is not None and "error" not in record and "missing" not in record

    def append(self, record: Record) -> None:
        self._records[_text(_key_in(record))] = record
        self._write(record)

    def all(self) -> list[Record]:
        """Returns the last record of every measurement, in the order in which they were first made."""
        return list(self._records.values())

    def _read(self) -> list[Record]:
        """Returns the file's lines; drops from the file a last one that was not written to its end."""
        if not self._file.exists():
            return []
        content = self._file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._file, len(whole))
        lines = []
        for number, line in enumerate(whole.decode().splitlines(), start=1):
            try:
                lines.append(json.loads(line))
                _text(lines[-1]["conditions"] if "conditions" in lines[-1] else _key_in(lines[-1]))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise BrokenFileError(f"{self._file.name}, line {number}, is no record of benchmarks.run") from error
        return lines

    def _write(self, line: Record) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _key_in(record: Record) -> Record:
    fields = [field.name for field in dataclasses.fields(Measure)]
    return {name: record[name] for name in [*fields, "environment"]}


def _text(key: Record) -> str:
    return json.dumps(key, sort_keys=True)
