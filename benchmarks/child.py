"""What runs in each process of a job: builds one contender, trains it, measures.

    python -m benchmarks.child memory|steps|tensor|pipeline|pipeline_memory

The first line on stdin is the case. What TensorFlow and Keras print goes to stderr; stdout carries answers only.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from benchmarks import measuring
from benchmarks.cases import Case
from benchmarks.devices import memory_of, own_devices, tensor_growth
from benchmarks.measuring import Answer, Fields, Requests
from benchmarks.pipeline_training import PipelineLoop
from benchmarks.resident import give_back, resident_bytes
from benchmarks.tensor_training import TensorLoop
from benchmarks.training import DataLoop, build_strategy

VERSIONS = {"tensorflow": tf.__version__, "keras": keras.__version__, "tfdist": tfdist.__version__}


def describe(loop: DataLoop) -> dict[str, Any]:
    plan = getattr(loop.strategy, "last_plan", None)
    counted = {} if plan is None else {"sent_bytes": plan.sent_bytes()}
    return {"parameters": sum(int(np.prod(weight.shape)) for weight in loop.model.trainable_weights), **counted, **VERSIONS}


# Measurements


def measure_memory(case: Case, answer: Answer, requests: Requests) -> None:
    strategy = build_strategy(case)
    memory = memory_of(own_devices(case))
    measuring.measure_memory(lambda: DataLoop(case, strategy), describe, memory, answer, requests)


def measure_steps(case: Case, answer: Answer, requests: Requests) -> None:
    strategy = build_strategy(case)
    measuring.measure_steps(lambda: DataLoop(case, strategy), describe, answer, requests)


def measure_tensor(case: Case, answer: Answer, requests: Requests) -> None:
    """Traces and warms up, says so, then tells the seconds of steps. All ranks share the layers."""
    loop = TensorLoop(case)
    _, loss = loop.run(3)
    report = tfdist.memory_report(loop.model)
    state_bytes = max(memory.total_bytes for memory in report.devices)
    answer({"warmup_loss": loss, "parameters": loop.model.count_params(), "state_bytes": state_bytes, **VERSIONS})
    measuring.answer_times(loop, answer, requests)


def measure_pipeline(case: Case, answer: Answer, requests: Requests) -> None:
    """As `measure_tensor`, of a pipeline; with the bytes of tensors that the steps add to those at rest, where counted."""
    loop = PipelineLoop(case)
    _, loss = loop.run(3)
    answer({"warmup_loss": loss, **VERSIONS})
    for request in requests:
        grown, (seconds, loss) = tensor_growth(own_devices(case), functools.partial(loop.run, request["steps"]))
        answer({"seconds": seconds, "loss": loss, "tensor_bytes": grown})


def measure_pipeline_memory(case: Case, answer: Answer, requests: Requests) -> None:
    give_back()
    imported = 0 if case.logical_gpus else resident_bytes()  # before there are devices
    loop = PipelineLoop(case)
    memory = memory_of(own_devices(case))
    _, loss = loop.run(3)
    answer({"warmup_loss": loss, **VERSIONS})
    measuring.answer_growths(loop, memory, imported, answer, requests)


_MEASUREMENTS = {
    "memory": measure_memory,
    "steps": measure_steps,
    "tensor": measure_tensor,
    "pipeline": measure_pipeline,
    "pipeline_memory": measure_pipeline_memory,
}


def _measure(fields: Fields, answer: Answer, requests: Requests) -> None:
    _MEASUREMENTS[sys.argv[1]](Case(**fields), answer, requests)
    measuring.stay(requests)


if __name__ == "__main__":
    measuring.serve(_measure)
