"""One rank of the gpt under PyTorch: what `benchmarks.child` is to tfdist.

    python -m benchmarks.torch_child tensor|pipeline|pipeline_memory

It needs no TensorFlow, and runs in any environment that has PyTorch and NumPy. The first line on stdin is the case.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases import Case
from benchmarks.resident import give_back, growths, resident_bytes
from benchmarks.torch_pipeline import PipelineLoop
from benchmarks.torch_tensor import TensorLoop


def measure_tensor(case: Case, answer: Callable[[dict[str, Any]], None], requests: Iterator[dict[str, Any]]) -> None:
    loop = TensorLoop(case)
    _, loss = loop.run(3)
    parameters = sum(parameter.numel() for parameter in loop.model.parameters())  # a DTensor's count is that of the whole
    answer({"warmup_loss": loss, "parameters": parameters, "state_bytes": loop.state_bytes(), "torch": torch.__version__})
    _answer_times(loop, answer, requests)


def measure_pipeline(case: Case, answer: Callable[[dict[str, Any]], None], requests: Iterator[dict[str, Any]]) -> None:
    loop = PipelineLoop(case)
    _, loss = loop.run(3)
    answer({"warmup_loss": loss, "torch": torch.__version__})
    _answer_times(loop, answer, requests)


def measure_pipeline_memory(case: Case, answer: Callable[[dict[str, Any]], None], requests: Iterator[dict[str, Any]]) -> None:
    give_back()
    imported = resident_bytes()
    loop = PipelineLoop(case)
    _, loss = loop.run(3)
    answer({"warmup_loss": loss, "torch": torch.__version__})
    for request in requests:
        found = growths(lambda: loop.run(1), request["steps"])
        answer({"rest_bytes": resident_bytes() - imported, "step_bytes": found})


def _answer_times(
    loop: TensorLoop | PipelineLoop, answer: Callable[[dict[str, Any]], None], requests: Iterator[dict[str, Any]]
) -> None:
    for request in requests:
        seconds, loss = loop.run(request["steps"])
        answer({"seconds": seconds, "loss": loss})


_MEASUREMENTS = {"tensor": measure_tensor, "pipeline": measure_pipeline, "pipeline_memory": measure_pipeline_memory}


def main() -> None:
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(fields: dict[str, Any]) -> None:
        channel.write(json.dumps(fields) + "\n")
        channel.flush()

    requests = (json.loads(line) for line in sys.stdin)
    case = Case(**next(requests))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // case.devices))
    torch.set_num_interop_threads(1)
    dist.init_process_group("gloo")
    _MEASUREMENTS[sys.argv[1]](case, answer, requests)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
