"""What runs in each process of a job: builds one contender, trains it, measures.

    python -m benchmarks.child memory|throughput|steps|tensor|pipeline|pipeline_memory

The first line on stdin is the case. What TensorFlow and Keras print goes to stderr; stdout carries answers only.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from benchmarks.cases import ZERO_STAGES, Case
from benchmarks.measuring import Answer, Requests
from benchmarks.pipeline_training import PipelineLoop
from benchmarks.resident import give_back, growths, resident_bytes
from benchmarks.tensor_training import TensorLoop
from benchmarks.training import FitLoop, FunctionLoop, build_loop, build_strategy
from tfdist.sharding import placements_of

VERSIONS = {"tensorflow": tf.__version__, "keras": keras.__version__, "tfdist": tfdist.__version__}


def describe(case: Case, loop: FunctionLoop | FitLoop) -> dict[str, Any]:
    """Returns the fields of a JSON line that only a process with TensorFlow knows."""
    sizes = [int(np.prod(weight.shape)) for weight in loop.model.trainable_weights]
    stage = ZERO_STAGES.get(case.contender, 0)  # a mirrored model and a single device hold what stage 0 holds
    placements = placements_of(stage)
    ranks_here = case.num_ranks // case.num_processes
    built = placements.fraction("parameter", case.num_ranks) + 2 * placements.fraction("optimizer_state", case.num_ranks)
    return {
        "parameters": sum(sizes),
        "parameter_bytes": 4 * sum(sizes),
        "floor_bytes": round(ranks_here * placements.bytes_per_parameter(case.num_ranks) * sum(sizes)),
        # Before the first gradient: what stays, and two variables in full, one being drawn or received and one being cut.
        "build_floor_bytes": round(ranks_here * 4 * built * sum(sizes)) + 2 * 4 * max(sizes),
        **VERSIONS,
    }


# Measurements


def tensor_bytes(reset_peak: bool = False) -> dict[str, int] | None:
    """Returns "current" and "peak" bytes in use of TensorFlow's CPU allocator, or None where it does not count them.

    All logical CPUs of a process share one allocator.
    """
    try:
        if reset_peak:
            tf.config.experimental.reset_memory_stats("CPU:0")
        return tf.config.experimental.get_memory_info("CPU:0")
    except ValueError:
        return None


def measure_memory(case: Case, answer: Answer, requests: Requests) -> None:
    """Answers once, to `{"steps": n, "warmup": bool}`: the process's memory at rest and at the peak of each phase."""
    strategy = build_strategy(case)
    give_back()
    imported = resident_bytes()
    answer({})
    request = next(requests)
    if request["warmup"]:
        tiny = dataclasses.replace(case, layers=2, width=4 * case.heads, vocabulary=8, global_batch_size=case.num_ranks)
        # The same strategy: two in one process would share collective keys under MirroredStrategy.
        build_loop(tiny, strategy).run(2)
        keras.backend.clear_session(free_memory=True)
        give_back()
    baseline = resident_bytes()
    tensors_before = tensor_bytes(reset_peak=True)
    loop, phases = measuring.train_in_phases(lambda: build_loop(case, strategy), request["steps"])
    give_back()
    tensors = tensor_bytes()
    answer(
        {
            "imported_rss_bytes": imported,
            "baseline_rss_bytes": baseline,
            **phases.fields(),
            "at_rest_rss_bytes": resident_bytes(),
            "tensor_peak_bytes": None if tensors is None else tensors["peak"] - tensors_before["current"],
            "tensor_at_rest_bytes": None if tensors is None else tensors["current"] - tensors_before["current"],
            **describe(case, loop),
        }
    )


def measure_throughput(case: Case, answer: Answer, requests: Requests) -> None:
    """Traces and warms up, says so, then answers every `{"steps": n}` with the seconds of n steps."""
    loop = build_loop(case, build_strategy(case))
    _, loss = loop.run(3)
    answer({"warmup_loss": loss, **describe(case, loop)})
    for request in requests:
        seconds, loss = loop.run(request["steps"])
        answer({"seconds": seconds, "loss": loss})


def measure_steps(case: Case, answer: Answer, requests: Requests) -> None:
    """As `measure_throughput`, with the seconds of building, of the first step and of each step."""
    strategy = build_strategy(case)
    measuring.measure_steps(lambda: build_loop(case, strategy), lambda loop: describe(case, loop), answer, requests)


def measure_tensor(case: Case, answer: Answer, requests: Requests) -> None:
    """As `measure_throughput`, of a model whose layers all ranks share."""
    loop = TensorLoop(case)
    _, loss = loop.run(3)
    report = tfdist.memory_report(loop.model)
    state_bytes = max(memory.total_bytes for memory in report.devices)
    answer({"warmup_loss": loss, "parameters": loop.model.count_params(), "state_bytes": state_bytes, **VERSIONS})
    for request in requests:
        seconds, loss = loop.run(request["steps"])
        answer({"seconds": seconds, "loss": loss})


def measure_pipeline(case: Case, answer: Answer, requests: Requests) -> None:
    """As `measure_throughput`, of a pipeline; with the bytes of tensors that the steps add to those at rest, where counted."""
    loop = PipelineLoop(case)
    _, loss = loop.run(3)
    answer({"warmup_loss": loss, **VERSIONS})
    for request in requests:
        before = tensor_bytes(reset_peak=True)
        seconds, loss = loop.run(request["steps"])
        peak = None if before is None else tensor_bytes()["peak"] - before["current"]
        answer({"seconds": seconds, "loss": loss, "tensor_bytes": peak})


def measure_pipeline_memory(case: Case, answer: Answer, requests: Requests) -> None:
    """Traces and warms up, says so, then answers every `{"steps": n}` with what each of n steps adds to the resident memory."""
    give_back()
    imported = resident_bytes()
    loop = PipelineLoop(case)
    _, loss = loop.run(3)
    answer({"warmup_loss": loss, **VERSIONS})
    for request in requests:
        found = growths(lambda: loop.run(1), request["steps"])
        answer({"rest_bytes": resident_bytes() - imported, "step_bytes": found})


_MEASUREMENTS = {
    "memory": measure_memory,
    "throughput": measure_throughput,
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
