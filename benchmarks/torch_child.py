"""One rank of the gpt or the mlp under PyTorch: what `benchmarks.child` is to tfdist.

    python -m benchmarks.torch_child steps|rounds|memory|tensor|pipeline|pipeline_memory

It needs no TensorFlow, and runs in any environment that has PyTorch and NumPy. The first line on stdin is the case.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import measuring
from benchmarks.cases import DEEPSPEED_STAGES, Case
from benchmarks.measuring import Answer, Fields, Requests
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
    loop_class = data_loop(case)
    measuring.measure_memory(lambda: loop_class(case), describe, memory_of(case), answer, requests)


def measure_tensor(case: Case, answer: Answer, requests: Requests) -> None:
    loop = TensorLoop(case)
    _, loss = loop.run(3)
    parameters = sum(parameter.numel() for parameter in loop.model.parameters())  # a DTensor's count is that of the whole
    answer({"warmup_loss": loss, "parameters": parameters, "state_bytes": loop.state_bytes(), "torch": torch.__version__})
    measuring.answer_times(loop, answer, requests)


def measure_pipeline(case: Case, answer: Answer, requests: Requests) -> None:
    loop = PipelineLoop(case)
    _, loss = loop.run(3)
    answer({"warmup_loss": loss, "torch": torch.__version__})
    measuring.answer_times(loop, answer, requests)


def measure_pipeline_memory(case: Case, answer: Answer, requests: Requests) -> None:
    memory = memory_of(case)
    give_back()
    imported = memory.in_use()
    loop = PipelineLoop(case)
    _, loss = loop.run(3)
    answer({"warmup_loss": loss, "torch": torch.__version__})
    measuring.answer_growths(loop, memory, imported, answer, requests)


_MEASUREMENTS = {
    "steps": measure_steps,
    "rounds": measure_rounds,
    "memory": measure_memory,
    "tensor": measure_tensor,
    "pipeline": measure_pipeline,
    "pipeline_memory": measure_pipeline_memory,
}


def _measure(fields: Fields, answer: Answer, requests: Requests) -> None:
    case = Case(**fields)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // case.devices))
    torch.set_num_interop_threads(1)
    join(case)
    _MEASUREMENTS[sys.argv[1]](case, answer, requests)
    measuring.stay(requests)
    dist.destroy_process_group()


if __name__ == "__main__":
    measuring.serve(_measure)
