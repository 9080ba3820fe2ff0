"""tfdist beside PyTorch on the gpt: what the benchmarks of tensor and of pipeline parallelism share. Imports no TensorFlow.

Both frameworks start from the same weights and train on the same batch with the same optimizer; the losses after the warm-up must
agree. PyTorch is asked for with `--torch-python`, a Python that can import torch and NumPy.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import cases
from benchmarks.cases import TFDIST, TORCH, Case
from benchmarks.job import SHARERS, Job, JobError
from benchmarks.resident import TUNED

# Relative, after the warm-up.
LOSS_TOLERANCE = 1e-5


def add_size_arguments(parser: argparse.ArgumentParser, *, layers: int) -> None:
    """Adds the sizes of the gpt, with that many layers unless told otherwise, and on which devices it is trained."""
    cases.add_logical_gpus(parser)
    add_sizes(parser, {"layers": layers, "width": 128, "heads": 4, "sequence-length": 64, "vocabulary": 256, "batch-size": 32})


def add_arguments(parser: argparse.ArgumentParser, *, layers: int, rounds: int, steps: int) -> None:
    """Adds the sizes of the gpt, the turns, and where PyTorch is; numbers are defaults."""
    add_size_arguments(parser, layers=layers)
    add_sizes(parser, {"rounds": rounds, "steps": steps})
    add_torch_arguments(parser)
    parser.add_argument("--no-torch", action="store_true", help="tfdist alone")
    parser.add_argument("--timeout-seconds", type=cases.positive_float, default=300, help="longest wait for an answer")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="append the JSON lines to FILE as well")


def add_torch_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds where PyTorch is."""
    parser.add_argument("--torch-python", metavar="PYTHON", default=sys.executable, help="a Python with torch; default: this one")
    parser.add_argument("--torch-preload", metavar="FILE", help="LD_PRELOAD of PyTorch's processes")


def add_sizes(parser: argparse.ArgumentParser, defaults: dict[str, int]) -> None:
    """Adds numbers, by name, with their defaults."""
    meanings = {"batch-size": "examples of a step, ", "rounds": "turns of every case, ", "steps": "steps of one turn, "}
    for name, default in defaults.items():
        help_text = f"{meanings.get(name, '')}default: {default}"
        parser.add_argument(f"--{name}", type=cases.positive_int, default=default, help=help_text)


def contenders(args: argparse.Namespace) -> list[str]:
    """Returns who is measured: PyTorch only where it is wanted and there."""
    if args.no_torch:
        return [TFDIST]
    if version_in(args.torch_python, "torch") is None:
        cases.progress(f"{pathlib.PurePath(args.torch_python).name} cannot import torch: tfdist alone")
        return [TFDIST]
    return [TFDIST, TORCH]


def make_case(args: argparse.Namespace, contender: str, devices: int, **fields: Any) -> Case:
    return Case(
        contender=contender,
        model="gpt",
        devices=devices,
        layers=args.layers,
        width=args.width,
        global_batch_size=args.batch_size,
        heads=args.heads,
        sequence_length=args.sequence_length,
        vocabulary=args.vocabulary,
        logical_gpus=args.logical_gpus,
        **fields,
    )


def start(measurement: str, case: Case, args: argparse.Namespace, environment: dict[str, str] | None = None) -> Job:
    """Starts the processes of a case, with `environment` added to theirs."""
    environment = {**(environment or {}), **peer_environment(case, args.torch_preload)}
    program = [args.torch_python, "-m", "benchmarks.torch_child"] if case.is_torch else [sys.executable, "-m", "benchmarks.child"]
    return Job(measurement, case, environment=environment, timeout_seconds=args.timeout_seconds, program=program)


def peer_environment(case: Case, preload: str | None) -> dict[str, str]:
    """Returns the variables that PyTorch's processes get: each has its part of the cores, and `preload` is its LD_PRELOAD.

    Threads that wait sleep: there are more of them than cores, and other contenders are to be left alone. Nothing for others.
    """
    if not case.is_torch:
        return {}
    threads = max(1, (os.cpu_count() or 1) // case.devices)
    accelerator = "cuda" if case.logical_gpus else "cpu"
    environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": accelerator}
    return {**environment, "LD_PRELOAD": preload} if preload else environment


def version_in(python: str, package: str) -> str | None:
    """Returns the version of a package that a Python can import; None: it cannot, or there is no such Python."""
    program = f"import {package}; print({package}.__version__)"
    try:
        found = subprocess.run(
            [python, "-c", program], capture_output=True, text=True, env={**os.environ, "DS_ACCELERATOR": "cpu"}
        )
    except OSError:
        return None
    return None if found.returncode else found.stdout.split()[-1]


@dataclasses.dataclass
class Result:
    """What the processes of a case said.

    Attributes:
        ready: when they were ready, one dictionary a process; None: they never were.
        answers: the same for each turn that counts.
        error: why it failed; None: it did not.
    """

    ready: list[dict[str, Any]] | None = None
    answers: list[list[dict[str, Any]]] = dataclasses.field(default_factory=list)
    error: str | None = None

    def fail(self, error: JobError) -> None:
        self.error = self.error or error.reason
        cases.progress(f"FAILED {error}")

    def speeds(self, tokens: int) -> list[float]:
        """Returns the tokens per second of each turn, of `tokens` each; none where the case failed."""
        if self.error is not None:
            return []
        return [tokens / max(answer["seconds"] for answer in answers) for answers in self.answers]


def take_turns(measurement: str, all_cases: Sequence[Case], args: argparse.Namespace) -> dict[Case, Result]:
    """Starts all cases, lets them take turns, round after round in rotating order, and ends them. The first round is not counted.

    A case whose loss after the warm-up is not that of the first one has failed.
    """
    results = {case: Result() for case in all_cases}
    jobs: dict[Case, Job] = {}
    environment = {**TUNED, SHARERS: str(len(all_cases))}
    with contextlib.ExitStack() as stack:
        for case, result in results.items():
            cases.progress(f"starting {case.label} ...")
            try:
                jobs[case] = stack.enter_context(start(measurement, case, args, environment))
                result.ready = jobs[case].ready
            except JobError as error:
                result.fail(error)
        for number in range(args.rounds + 1):
            cases.progress(f"round {number} of {args.rounds} ...")
            shift = number % len(all_cases)
            for case in [*all_cases[shift:], *all_cases[:shift]]:
                if results[case].error is not None:
                    continue
                try:
                    answers = jobs[case].ask({"steps": args.steps})
                except JobError as error:
                    results[case].fail(error)
                    continue
                if number > 0:
                    results[case].answers.append(answers)
    check_losses(results)
    return results


def check_losses(results: dict[Case, Result]) -> None:
    """Fails the cases whose loss is not that of the first one that has any."""
    losses = {case: result.ready[0]["warmup_loss"] for case, result in results.items() if result.ready is not None}
    if not losses:
        return
    reference_case, reference = next(iter(losses.items()))
    for case, loss in losses.items():
        if not abs(loss - reference) <= LOSS_TOLERANCE * abs(reference):  # a comparison that NaN fails
            reason = f"the loss, {loss}, is not that of {reference_case.label}, {reference}: not the same work"
            results[case].error = results[case].error or reason


def ratios(own: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Returns the median and the range of own / other in the same round; None where one of them failed."""
    found = [mine / its for mine, its in zip(own, other, strict=False)]
    if not found:
        return {"median": None, "range": None}
    return {"median": statistics.median(found), "range": [min(found), max(found)]}
