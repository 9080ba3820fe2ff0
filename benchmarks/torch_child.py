"""One rank of the gpt or the mlp under PyTorch: what `benchmarks.child` is to tfdist.

    python -m benchmarks.torch_child steps|rounds|memory|tensor|pipeline|pipeline_memory

It needs no TensorFlow, and runs in any environment that has PyTorch and NumPy. The first line on stdin is the case.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import measuring
from benchmarks.cases import DEEPSPEED_STAGES, Case
from benchmarks.measuring import Answer, Requests
from benchmarks.memory import growths
from benchmarks.resident import give_back
from benchmarks.torch_data import DataLoop
from benchmarks.torch_devices import join, memory_of
from benchmarks.torch_pipeline import PipelineLoop
from benchmarks.torch_tensor import TensorLoop


def data_loop(case: Case) -> type[DataLoop]:
    """Returns the loop of a data parallel contender, importing what only DeepSpeed needs."""
    if case.contender in DEEPSPEED_STAGES:
        return importlib.import_module("benchmarks.torch_deepspeed").DeepSpeedLoop
    return DataLoop


def describe(loop: DataLoop) -> dict[str, Any]:
    return {"parameters": loop.parameters, "torch": torch.__version__}


def measure_steps(case: Case, answer: Answer, requests: Requests) -> None:
    loop_class = data_loop(case)
    measuring.measure_steps(lambda: loop_class(case), describe, answer, requests)


def measure_rounds(case: Case, answer: Answer, requests: Requests) -> None:
    loop_class = data_loop(case)
    memory = memory_of(case) if case.logical_gpus else None
    measuring.measure_rounds(lambda: loop_class(case), describe, memory, answer, requests)


def measure_memory(case: Case, answer: Answer, requests: Requests) -> None:
    """Answers once, to `{"steps": n}`, as `benchmarks.child` does."""
    loop_class = data_loop(case)
    memory = memory_of(case)
    give_back()
    imported = memory.in_use()
    answer({})
    loop, phases = measuring.train_in_phases(lambda: loop_class(case), next(requests)["steps"], memory)
    give_back()
    answer(
        {
            "imported_rss_bytes": imported,
            **phases.fields(),
            "at_rest_rss_bytes": memory.in_use(),
            **describe(loop),
        }
    )


def measure_tensor(case: Case, answer: Answer, requests: Requests) -> None:
    loop = TensorLoop(case)
    _, loss = loop.run(3)
    parameters = sum(parameter.numel() for parameter in loop.model.parameters())  # a DTensor's count is that of the whole
    answer({"warmup_loss": loss, "parameters": parameters, "state_bytes": loop.state_bytes(), "torch": torch.__version__})
    _answer_times(loop, answer, requests)


def measure_pipeline(case: Case, answer: Answer, requests: Requests) -> None:
    loop = PipelineLoop(case)
    _, loss = loop.run(3)
    answer({"warmup_loss": loss, "torch": torch.__version__})
    _answer_times(loop, answer, requests)


def measure_pipeline_memory(case: Case, answer: Answer, requests: Requests) -> None:
    memory = memory_of(case)
    give_back()
    imported = memory.in_use()
    loop = PipelineLoop(case)
    _, loss = loop.run(3)
    answer({"warmup_loss": loss, "torch": torch.__version__})
    for request in requests:
        found = growths(memory, lambda: loop.run(1), request["steps"])
        answer({"rest_bytes": memory.in_use() - imported, "step_bytes": found})


def _answer_times(loop: TensorLoop | PipelineLoop, answer: Answer, requests: Requests) -> None:
    for request in requests:
        seconds, loss = loop.run(request["steps"])
        answer({"seconds": seconds, "loss": loss})


_MEASUREMENTS = {
    "steps": measure_steps,
    "rounds": measure_rounds,
    "memory": measure_memory,
    "tensor": measure_tensor,
    "pipeline": measure_pipeline,
    "pipeline_memory": measure_pipeline_memory,
}


def main() -> None:
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(fields: dict[str, Any]) -> None:
        channel.write(json.dumps(fields) + "\n")
        channel.flush()

    requests = (json.loads(line) for line in sys.stdin)
    case = Case(**next(requests))
    try:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // case.devices))
        torch.set_num_interop_threads(1)
        join(case)
        _MEASUREMENTS[sys.argv[1]](case, answer, requests)
        for _ in requests:  # stay until the parent ends the input: the other ranks may not be done
            pass
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 (the parent reports it)
        traceback.print_exc()
        with contextlib.suppress(BrokenPipeError):  # the parent is gone
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
