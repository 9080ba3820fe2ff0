"""Runs cases of `cases.py` on this process's null GPUs, and reports of each what its plan and its graph were.

python -m tests.null_gpu.program NAME...
"""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from tests.null_gpu import device
from tests.null_gpu.cases import CASES
from tests.null_gpu.running import report
from tfdist import keras_hooks


def main(names: list[str]) -> None:
    keras_hooks.install()
    for name in names:
        began = time.monotonic()
        try:
            found = _run(name)
        except Exception:  # the others are worth running, and the test says which have failed
            found = {"error": traceback.format_exc()}
        report(name, {**found, "seconds": time.monotonic() - began})


def _run(name: str) -> dict[str, Any]:
    """Runs three steps: one that traces, and one for each value of the conditions that the host reads from a device."""
    strategy, step = CASES[name]()
    plan = None
    nodes: list[Any] = []
    for number, condition in enumerate((True, True, False)):
        device.set_condition(condition)
        if number == 0:
            context.enable_run_metadata()
        device.note(f"{name} {number} begins")
        step()
        device.note(f"{name} {number} ends")
        if number == 0:
            plan, nodes = strategy.last_plan, _nodes_of_step()
    records = {rank: [_record(record) for record in plan.records[rank]] for rank in plan.local_ranks}
    peaks = [tf.config.experimental.get_memory_info(gpu.name.split("device:")[1])["peak"] for gpu in _gpus()]
    return {"plan": records, "nodes": nodes, "peaks": peaks}


def _gpus() -> list[Any]:
    return tf.config.list_logical_devices("GPU")


def _record(record: Any) -> dict[str, Any]:
    return {"op": record.op, "ranks": record.ranks, "bytes": record.input_bytes, "dtype": record.dtype, "label": record.label}


def _nodes_of_step() -> list[tuple[str, str, str]]:
    """Returns (operation, name, device) of what the step ran, as TensorFlow placed it after its optimizers.

    The step is the largest of the functions that ran meanwhile. Graphs are collected by whichever thread comes first, so that a
    read of a variable by the failure watch may stand among the step's.
    """
    metadata = context.export_run_metadata()
    context.disable_run_metadata()
    functions = [
        [node for graph in one.partition_graphs if not _is_one_read(graph) for node in graph.node]
        for one in metadata.function_graphs
    ]
    step = max(functions, key=len)
    assert any(node.op.startswith("Collective") for node in step), "the step is not among what was collected"
    return [(node.op, node.name, node.device) for node in step]


def _is_one_read(graph: Any) -> bool:
    return sorted(node.op for node in graph.node) == ["ReadVariableOp", "_Arg", "_Retval"]


if __name__ == "__main__":
    main(sys.argv[1:])
