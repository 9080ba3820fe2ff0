"""Jobs of several worker processes, for tests: start them, wait with a limit, end every one by its own id."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import time
import unittest
from collections.abc import Iterator, Sequence
from typing import Any

from tests import forks, graph_optimizer, layer_groups

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Worker:
    """One worker process; `result` is what its function returned, `output` what it printed."""

    name: str
    process: subprocess.Popen | forks.Fork
    folder: pathlib.Path

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")

    @property
    def result(self) -> Any:
        return pickle.loads((self.folder / "result.pickle").read_bytes())

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    def wait_for(self, text: str, seconds: float) -> None:
        """Waits until the worker has printed `text`."""
        end = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < end and self.process.poll() is None, f"{self.name} did not print {text!r}:\n{self.output}"
            time.sleep(0.05)


@dataclasses.dataclass
class Job:
    workers: list[Worker]

    def wait(self, seconds: float) -> list[int]:
        """Returns the workers' exit codes once all have ended; fails after `seconds`."""
        end = time.monotonic() + seconds
        while any(worker.returncode is None for worker in self.workers):
            if time.monotonic() > end:
                running = [worker for worker in self.workers if worker.returncode is None]
                tails = "\n".join(f"--- {worker.name}\n{worker.output[-3000:]}" for worker in self.workers)
                raise AssertionError(f"still running after {seconds:g} s: {[worker.name for worker in running]}\n{tails}")
            time.sleep(0.05)
        return [worker.returncode for worker in self.workers]

    def results(self, seconds: float) -> list[Any]:
        """Waits for all workers to succeed and returns their results in rank order."""
        codes = self.wait(seconds)
        for worker, code in zip(self.workers, codes, strict=True):
            assert code == 0, f"{worker.name} ended with {code}:\n{worker.output[-6000:]}"
        return [worker.result for worker in self.workers]


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("localhost", 0))
        return [one.getsockname()[1] for one in sockets]


def tf_config(addresses: Sequence[str], worker_index: int, chief: bool = False) -> dict[str, Any]:
    """Returns the TF_CONFIG of the worker at `worker_index`; with `chief` the first task is the chief."""
    if not chief:
        return {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": worker_index}}
    cluster = {"chief": [addresses[0]], "worker": list(addresses[1:])}
    task = {"type": "worker", "index": worker_index - 1} if worker_index else {"type": "chief", "index": 0}
    return {"cluster": cluster, "task": task}


@contextlib.contextmanager
def job(
    folder: pathlib.Path,
    number: int,
    target: str,
    *arguments: Any,
    devices_per_worker: int = 1,
    chief: bool = False,
    delays: Sequence[float] = (),
    ports: Sequence[int] | None = None,
    each: Sequence[dict[str, Any]] | None = None,
    environment: dict[str, str] | None = None,
    only: Sequence[int] | None = None,
    programs: Sequence[int] = (),
) -> Iterator[Job]:
    """Starts `number` workers that call `target` ("package.module:function") with `arguments`, and ends them afterwards.

    Args:
        delays: seconds before each worker starts; none: at once.
        each: keyword arguments of the function, per worker.
        environment: variables for all workers.
        only: the workers that are started at all; None: all.
        programs: the workers that begin, and end, as a user's do; the others are forks that have imported TensorFlow.

    Raises:
        unittest.SkipTest: the tests run on a card (tests/devices.py), whose memory this process has divided.
    """
    if os.environ.get("TFDIST_TESTS_GPU_MIB"):
        raise unittest.SkipTest("starts processes, which a card that is divided has no room for")
    ports = ports or free_ports(number)
    addresses = [f"localhost:{port}" for port in ports]
    workers: list[Worker] = []
    try:
        for index in range(number) if only is None else only:
            time.sleep(delays[index] if delays else 0)
            own = folder / f"worker_{index}"
            own.mkdir(parents=True)
            variables = {
                **os.environ,
                "TF_CONFIG": json.dumps(tf_config(addresses, index, chief)),
                "TFDIST_DEVICES_PER_WORKER": str(devices_per_worker),
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "PYTHONPATH": str(ROOT),
                **(environment or {}),
            }
            call = {"target": target, "arguments": arguments, "keywords": each[index] if each else {}}
            launch = _program if index in programs else _fork
            process = launch(call, own / "result.pickle", variables, own / "output.txt")
            workers.append(Worker(f"worker {index}", process, own))
        yield Job(workers)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()


def _fork(call: dict[str, Any], result: pathlib.Path, variables: dict[str, str], output: pathlib.Path) -> forks.Fork:
    return forks.start(run, call, result, environment=variables, folder=ROOT, output=output)


def _program(call: dict[str, Any], result: pathlib.Path, variables: dict[str, str], output: pathlib.Path) -> subprocess.Popen:
    with open(output, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.workers", json.dumps(call), str(result)],
            env=variables,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def run(call: dict[str, Any], path: pathlib.Path) -> None:
    graph_optimizer.switch_as_the_test_did()
    layer_groups.gather_each_layer_alone()
    module, _, name = call["target"].partition(":")
    result = getattr(importlib.import_module(module), name)(*call["arguments"], **call["keywords"])
    path.write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    run(json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]))
