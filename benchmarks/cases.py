"""What is measured, with which arguments, and how results are shown. Imports no TensorFlow."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

SINGLE, MIRRORED, MW_MIRRORED = "single", "mirrored", "mw-mirrored"
TFDIST, TORCH = "tfdist", "torch"  # of benchmarks.tensor_parallel and benchmarks.pipeline
ZERO_STAGES = {f"zero{stage}": stage for stage in range(4)}
KERAS_KERNELS = {f"{contender}-keras": contender for contender in ("zero1", "zero2", "zero3")}  # tfdist, Keras's own kernels
# Data parallelism in PyTorch, of benchmarks.run.
TORCH_SINGLE, DDP, ZERO_REDUNDANCY, FSDP2 = "torch-single", "ddp", "zero-redundancy", "fsdp2"
DDP_BF16, DDP_POWERSGD = "ddp-bf16", "ddp-powersgd"  # of benchmarks.links: DDP with a hook that sends fewer bytes
DEEPSPEED_STAGES = {f"ds{stage}": stage for stage in (1, 2, 3)}
TORCH_DATA = (TORCH_SINGLE, DDP, DDP_BF16, DDP_POWERSGD, ZERO_REDUNDANCY, FSDP2, *DEEPSPEED_STAGES)
SINGLES = (SINGLE, TORCH_SINGLE)
STAGES = {**ZERO_STAGES, ZERO_REDUNDANCY: 1, FSDP2: 3, **DEEPSPEED_STAGES}  # what a rank holds; others hold what stage 0 does


@dataclasses.dataclass(frozen=True)
class Case:
    """One contender on one model.

    Attributes:
        contender: "single" (no strategy), "mirrored" (`tf.distribute.MirroredStrategy`), "mw-mirrored"
            (`tf.distribute.MultiWorkerMirroredStrategy`) or "zero0" to "zero3" (`tfdist.ShardedStrategy`, or
            `tfdist.MultiWorkerShardedStrategy`). Where all devices are tensor or pipeline ranks: "tfdist" (`tfdist.parallelize`,
            `tfdist.PipelineModel`) or "torch" (PyTorch's `parallelize_module`, `torch.distributed.pipelining`, a process a rank).
            Of `benchmarks.run`, in PyTorch: "torch-single" (one process), "ddp", "zero-redundancy", "fsdp2", "ds1" to "ds3".
            Of `benchmarks.links`, in PyTorch: "ddp-bf16" (gradients in bfloat16), "ddp-powersgd" (PowerSGD of rank 4).
        model: "mlp", a stack of square Dense layers, or "gpt", a decoder.
        devices: that share the work; a "single" contender uses the first, and makes no other logical CPUs.
        layers: Dense layers, or decoder blocks.
        width: units of a Dense layer, or the embedding's size.
        global_batch_size: examples of one step, over all devices.
        multi_worker: whether each device belongs to a worker process of its own, of one TF_CONFIG job; else all are
            devices of one process.
        use_kernels: passed to tfdist's strategy.
        heads, sequence_length, vocabulary: of the gpt.
        schedule: of a pipeline, by its name in `tfdist.pipeline.make_schedule`; None: no pipeline.
        num_microbatches: of a pipeline.
        logical_gpus: in how many parts one GPU is split, of which the first `devices` are the ranks; 0: ranks are logical CPUs.
            A rank of PyTorch has the GPU with the others.
        jit_compile: whether XLA compiles the step: of "single" only.
        auto_clustering: whether XLA compiles what TensorFlow likes of the step, between the collectives.
        policy: Keras's dtype policy.
        gradients, parameters: how tfdist's ranks send them: see `tfdist.compression`, or "top_k_int4", "top_k_alone" (the largest
            1 % and nothing else), "top_k_feedback" (which keeps what that loses); None: exactly.
    """

    contender: str
    model: str
    devices: int
    layers: int
    width: int
    global_batch_size: int
    multi_worker: bool = False
    use_kernels: bool | None = None
    heads: int = 4
    sequence_length: int = 64
    vocabulary: int = 1000
    schedule: str | None = None
    num_microbatches: int = 1
    logical_gpus: int = 0
    jit_compile: bool = False
    auto_clustering: bool = False
    policy: str = "float32"
    gradients: str | None = None
    parameters: str | None = None

    @property
    def num_ranks(self) -> int:
        return 1 if self.contender in SINGLES else self.devices

    @property
    def is_torch(self) -> bool:
        return self.contender == TORCH or self.contender in TORCH_DATA

    @property
    def num_processes(self) -> int:
        return self.num_ranks if self.multi_worker or self.is_torch else 1

    @property
    def floor_bytes_per_parameter(self) -> float:
        """Bytes of parameter, gradient and two Adam slots, float32, that a rank holds: its stage's formula."""
        whole, cut = {0: (16, 0), 1: (8, 8), 2: (4, 12), 3: (0, 16)}[STAGES.get(self.contender, 0)]
        return whole + cut / self.num_ranks

    @property
    def stages_per_rank(self) -> int:
        return 2 if self.schedule == "interleaved" else 1

    @property
    def num_stages(self) -> int:
        return self.devices * self.stages_per_rank

    def blocks_of(self, stage: int) -> range:
        """Returns the decoder blocks of a pipeline's stage: as many in each."""
        return range(self.layers * stage // self.num_stages, self.layers * (stage + 1) // self.num_stages)

    @property
    def label(self) -> str:
        if self.schedule is not None:
            return f"{self.contender} {self.schedule} x{self.devices} m{self.num_microbatches}"
        return self.contender if self.contender in SINGLES else f"{self.contender} x{self.devices}"


# Arguments


def positive_int(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    return _at_least(1, int, text)


def positive_float(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = _at_least(0, float, text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number above 0. Received: {text}")
    return value


def _at_least(least: int, kind: Callable[[str], Any], text: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not value >= least:
        noun = "an integer" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"must be {noun} of at least {least}. Received: {text}")
    return value


def add_logical_gpus(parser: argparse.ArgumentParser) -> None:
    """Adds the choice between logical CPUs and parts of one GPU."""
    help_text = "split one GPU in N, and let the first of its parts be the ranks; memory is then what their allocators count"
    parser.add_argument("--logical-gpus", type=positive_int, default=0, metavar="N", help=f"{help_text} (default: logical CPUs)")


# Results


def command_line() -> str:
    """Returns the command that started this program, without the machine's own paths."""
    program, *rest = (pathlib.PurePath(word) for word in sys.orig_argv)
    return " ".join([program.name, *(word.name if word.is_absolute() else str(word) for word in rest)])


def machine_fields() -> dict[str, Any]:
    """Returns the fields of a JSON line that say where it was measured."""
    return {
        "command": command_line(),
        "cpu_count": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def emit(record: dict[str, Any], file: pathlib.Path | None) -> None:
    """Prints `record` as one JSON line, and appends it to `file`."""
    line = json.dumps(record)
    print(line, flush=True)
    if file is not None:
        with file.open("a") as stream:
            stream.write(line + "\n")


def progress(text: str) -> None:
    """Tells the person who waits, on stderr: stdout has the results."""
    print(text, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a text table; first column to the left, None as "-"."""
    cells = [list(header), *[["-" if cell is None else str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def number(value: float | None, digits: int = 2) -> str | None:
    """Formats a figure of a table; None stays None."""
    return None if value is None else f"{value:.{digits}f}"


@dataclasses.dataclass(frozen=True)
class Target:
    """A figure that the project promises.

    Attributes:
        text: what is promised, in words, with the limit.
        value: what was measured; None: not measured in this run.
        is_met: whether `value` keeps the promise.
    """

    text: str
    value: float | None
    is_met: bool

    def __str__(self) -> str:
        if self.value is None:
            return f"target  {self.text}: not measured in this run"
        return f"target  {self.text}: {self.value:.2f}, {'met' if self.is_met else 'MISSED'}"


def exit_code(targets: Sequence[Target], *, failures: int, check: bool) -> int:
    """Returns 1 when a case failed or, with `check`, a target is missed or was not measured; 0 otherwise."""
    return int(bool(failures) or (check and not (targets and all(target.is_met for target in targets))))
