"""Starts programs on null GPUs: processes of their own, because TensorFlow opens NVIDIA's libraries when it is imported."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from tests import workers
from tests.null_gpu import building
from tests.null_gpu.log import Log

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Machine:
    """What each process has.

    Args:
        devices: how many null GPUs.
        bytes: memory of each.
        product_us: microseconds that a matrix product takes.
        message_us: microseconds that a collective takes once all of its ranks have come.
        message_us_per_mib: and so many more for each MiB that a rank sends in a ring.
        timeout_seconds: after which a collective that waits for a rank is reported as a deadlock. On a busy machine a process
            comes to its first one long after the others: four were seen to differ by more than 30 s.
    """

    devices: int
    bytes: int = 256 << 20
    product_us: int = 0
    message_us: int = 0
    message_us_per_mib: int = 0
    timeout_seconds: int = 120


@dataclasses.dataclass(frozen=True)
class Ended:
    """What has become of a program.

    Attributes:
        codes: the exit codes of its processes.
        outputs: what each has printed.
        results: what each has given to `report`, by name.
        processes: their ids, as in the log.
        log: what their devices have done.
    """

    codes: list[int]
    outputs: list[str]
    results: list[dict[str, Any]]
    processes: list[int]
    log: Log


def run(folder: pathlib.Path, machine: Machine, program: list[str], workers_number: int = 1, seconds: float = 240) -> Ended:
    """Runs `python PROGRAM...` in one process, or in several that TF_CONFIG makes one job; ends each by its own id.

    Args:
        folder: an empty one, for logs and for what ranks share.
        program: arguments of Python, such as ["-m", "tests.null_gpu.program", "cases"].
        seconds: after which what still runs is ended.
    """
    variables = {
        **os.environ,
        "LD_LIBRARY_PATH": str(building.build()),
        "NULL_GPU_DEVICES": str(machine.devices),
        "NULL_GPU_BYTES": str(machine.bytes),
        "NULL_GPU_PRODUCT_US": str(machine.product_us),
        "NULL_GPU_MESSAGE_US": str(machine.message_us),
        "NULL_GPU_MESSAGE_US_PER_MIB": str(machine.message_us_per_mib),
        "NULL_GPU_TIMEOUT_S": str(machine.timeout_seconds),
        "NULL_GPU_FOLDER": str(folder),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": str(ROOT),
    }
    addresses = [f"localhost:{port}" for port in workers.free_ports(workers_number)]
    started: list[subprocess.Popen] = []
    try:
        for index in range(workers_number):
            if workers_number > 1:
                variables["TF_CONFIG"] = json.dumps(workers.tf_config(addresses, index))
            with open(folder / f"output.{index}", "wb") as output:
                command = [sys.executable, "-u", *program]
                started.append(subprocess.Popen(command, env=variables, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT))
        end = time.monotonic() + seconds
        while any(process.poll() is None for process in started) and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
            process.wait()
    outputs = [(folder / f"output.{index}").read_text(encoding="utf-8", errors="replace") for index in range(workers_number)]
    processes = [process.pid for process in started]
    results = [_results(folder / f"results.{process}") for process in processes]
    return Ended([process.returncode for process in started], outputs, results, processes, Log.read(folder))


def report(name: str, value: Any) -> None:
    """Gives the test a value that JSON can hold; for the program itself."""
    path = pathlib.Path(os.environ["NULL_GPU_FOLDER"]) / f"results.{os.getpid()}"
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps([name, value]) + "\n")


def _results(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return dict(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
