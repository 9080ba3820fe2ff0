"""What a disturbed program leaves on its way: marks with the time, by which faults find their moment, and the losses.

A file per attempt and worker. Without TensorFlow: the first mark stands before its import.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from typing import Any

VARIABLE = "TFDIST_SOAK"  # the file that describes the run; whoever has it in its environment belongs to the run


def spec() -> dict[str, Any]:
    return json.loads(pathlib.Path(os.environ[VARIABLE]).read_text("utf-8"))


def attempt() -> int:
    return int(os.environ.get("TFDIST_ATTEMPT", "0"))


def worker() -> int:
    """Returns the number of this worker; a TF_CONFIG that is wrong on purpose does not say it."""
    own = os.environ.get("TFDIST_SOAK_WORKER")
    return int(own if own else json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def _append(kind: str, line: list[Any]) -> None:
    name = f"{kind}_{attempt()}_{worker()}.jsonl"
    descriptor = os.open(pathlib.Path(os.environ[VARIABLE]).parent / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{json.dumps(line)}\n".encode())
    os.close(descriptor)


def mark(name: str) -> None:
    """Says where the program is: "start", "connected", "epoch 2", ..."""
    _append("marks", [name, time.time()])


def log(name: str, value: Any) -> None:
    """Records a number that the job logs, under a name that it has in every run."""
    _append("losses", [name, value])


def read(folder: pathlib.Path, kind: str, attempt: int, worker: int) -> list[list[Any]]:
    """Returns the [name, value] that a worker has left so far."""
    path = folder / f"{kind}_{attempt}_{worker}.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def read_all(folder: pathlib.Path, kind: str) -> dict[tuple[int, int], list[list[Any]]]:
    """Returns what all have left, by (attempt, worker)."""
    keys = [tuple(map(int, path.stem.split("_")[1:])) for path in folder.glob(f"{kind}_*.jsonl")]
    return {key: read(folder, kind, *key) for key in sorted(keys)}
