"""What runs in each process of a job: builds one contender, trains it, measures.

    python -m benchmarks.child memory|steps|tensor|pipeline|pipeline_memory

The first line on stdin is the case. What TensorFlow and Keras print goes to stderr; stdout carries answers only.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import traceback
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from benchmarks import measuring
from benchmarks.cases import Case
from benchmarks.devices import memory_of, own_devices, tensor_growth
from benchmarks.measuring import Answer, Requests
from benchmarks.memory import growths
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
    """Answers once, to `{"steps": n}`: the memory of the process, or of its GPUs, at rest and at the peak of each phase."""
    strategy = build_strategy(case)
    memory = memory_of(own_devices(case))
    give_back()
    imported = memory.in_use()
    answer({})
    loop, phases = measuring.train_in_phases(lambda: DataLoop(case, strategy), next(requests)["steps"], memory)
    give_back()
    answer({"imported_rss_bytes": imported, **phases.fields(), "at_rest_rss_bytes": memory.in_use(), **describe(loop)})


def measure_steps(case: Case, answer: Answer, requests: Requests) -> None:
    strategy = build_strategy(case)
    measuring.measure_steps(lambda: DataLoop(case, strategy), describe, answer, requests)


def measure_tensor(case: Case, answer: Answer, requests: Requests) -> None:
    """Traces and warms up, says so, then answers every `{"steps": n}` with the seconds of n steps. All ranks share the layers."""
    loop = TensorLoop(case)
    _, loss = loop.run(3)
    report = tfdist.memory_report(loop.model)
    state_bytes = max(memory.total_bytes for memory in report.devices)
    answer({"warmup_loss": loss, "parameters": loop.model.count_params(), "state_bytes": state_bytes, **VERSIONS})
    for request in requests:
        seconds, loss = loop.run(request["steps"])
        answer({"seconds": seconds, "loss": loss})


def measure_pipeline(case: Case, answer: Answer, requests: Requests) -> None:
    """As `measure_tensor`, of a pipeline; with the bytes of tensors that the steps add to those at rest, where counted."""
    loop = PipelineLoop(case)
    _, loss = loop.run(3)
    answer({"warmup_loss": loss, **VERSIONS})
    for request in requests:
        grown, (seconds, loss) = tensor_growth(own_devices(case), functools.partial(loop.run, request["steps"]))
        answer({"seconds": seconds, "loss": loss, "tensor_bytes": grown})


def measure_pipeline_memory(case: Case, answer: Answer, requests: Requests) -> None:
    """Traces and warms up, says so, then answers every `{"steps": n}` with what each of n steps adds to the memory."""
    give_back()
    imported = 0 if case.logical_gpus else resident_bytes()  # before there are devices
    loop = PipelineLoop(case)
    memory = memory_of(own_devices(case))
    _, loss = loop.run(3)
    answer({"warmup_loss": loss, **VERSIONS})
    for request in requests:
        found = growths(memory, lambda: loop.run(1), request["steps"])
        answer({"rest_bytes": memory.in_use() - imported, "step_bytes": found})


_MEASUREMENTS = {
    "memory": measure_memory,
    "steps": measure_steps,
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
    try:
        _MEASUREMENTS[sys.argv[1]](Case(**next(requests)), answer, requests)
        for _ in requests:  # stay until the parent ends the input: the other workers may not be done
            pass
    except Exception as error:  # noqa: BLE001 (the parent reports it)
        traceback.print_exc()
        with contextlib.suppress(BrokenPipeError):  # the parent is gone
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
