"""Steps of every kind, traced as for GPUs: no operation without a GPU kernel, no call of Python, no collective that is refused.

Without a GPU: what is asked is TensorFlow's registry of kernels. `python tests/gpu_audit/program.py` prints all that is found.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

from tests.gpu_audit import parallel_steps, registry
from tests.gpu_audit.as_gpus import as_gpus
from tests.gpu_audit.audit import Finding, findings
from tests.gpu_audit.exceptions import ALLOWED, refused
from tests.gpu_audit.graphs import Walk

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = parallel_steps.STEPS
RING = ("/float32", "/mixed", "2x2x2", "collectives", "1f1b", "accumulation/stage", "one's own")  # words in the names of steps

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not registry.has_gpu_kernels(), reason="this TensorFlow was built without GPU kernels"),
]


@pytest.mark.parametrize(
    ("transport", "step"),
    [
        ("nccl", "stage 3/mixed_bfloat16"),
        ("nccl", "words as int64/stage 3"),
        ("nccl", "loss scale, accumulation/stage 2"),
        ("nccl", "stage 3/compressed: int4"),
        ("nccl", "pipeline/1f1b"),
        ("nccl", "collectives of every dtype"),
        ("nccl", "collectives of unknown lengths"),
        pytest.param("ring", "stage 2/mixed_float16", marks=pytest.mark.exhaustive),  # null GPUs run such a step
        ("ring", "collectives of every dtype"),
    ],
)
def test_a_step_can_run_on_gpus(transport, step):
    with as_gpus(transport):
        graph = STEPS[step]()
    assert refused(list(findings(graph)), step) == []
    operations = list(Walk(graph))
    assert {"gpu:0", "gpu:1"} <= {placed.device for placed in operations}
    hints = {x.operation.get_attr("communication_hint") for x in operations if x.operation.type.startswith("Collective")}
    assert hints == {transport.encode()}


def test_ids_of_int64_never_wait_for_the_gpu():
    """What docs/notes/gpus.md advises: Keras's embedding of int32 ids moves them to the host and back in every step."""
    with as_gpus("nccl"):
        of_int64, of_int32 = (findings(STEPS[f"words as {dtype}/stage 3"]()) for dtype in ("int64", "int32"))
    assert not [finding for finding in of_int64 if finding.kind == "to the host"]
    assert [finding for finding in of_int32 if finding.kind == "to the host"]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_every_kind_of_step_can_run_on_gpus():
    """And every exception is needed by one of them."""
    needed, bad = set(), []
    for transport, words in (("nccl", ()), ("ring", RING)):
        for step, found in _found_by_program(transport, words).items():
            bad += [(transport, step, finding) for finding in refused(found, step)]
            needed |= {one for one in ALLOWED for finding in found if one.allows(finding, step)}
    assert bad == []
    assert [one.pattern for one in ALLOWED if one not in needed] == []


def _found_by_program(transport, words):
    """Returns by step what is found in a process of nine devices."""
    command = [sys.executable, str(pathlib.Path(__file__).parent / "program.py"), "--transport", transport, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert process.returncode == 0, process.stderr[-3000:]
    rows = [json.loads(line) for line in process.stdout.splitlines()]
    assert [row for row in rows if "error" in row] == []
    assert {row["step"] for row in rows} == {name for name in STEPS if not words or any(word in name for word in words)}
    return {row["step"]: [Finding(kind, what) for kind, what, *_ in row["found"]] for row in rows}


# The audit sees what it is for: each of these is found


def _graph_of(function, device="CPU:1"):
    @tf.function(autograph=False)
    def traced(x):
        with tf.device(device):
            return function(x)

    return traced.get_concrete_function(tf.TensorSpec([4], tf.float32)).graph


def _collective(x, operation="CollectiveReduceV2", dtype=tf.bfloat16, hint="ring"):
    extra = {"merge_op": "Add", "final_op": "Id", "max_subdivs_per_device": -1} if "Reduce" in operation else {}
    extra.pop("max_subdivs_per_device", None) if "Scatter" in operation else None
    return getattr(tf.raw_ops, operation)(
        input=tf.cast(x, dtype), ordering_token=[], group_size=2, group_key=1, instance_key=1, communication_hint=hint, **extra
    )


@pytest.mark.parametrize(
    ("function", "finding"),
    [
        (lambda x: tf.pad(tf.cast(x, tf.int64), [[0, 1]]), Finding("missing", "Pad(int64,int32) -> (int64)")),
        (lambda x: tf.py_function(lambda y: y, [x], tf.float32), Finding("python", "EagerPyFunc on gpu:0")),
        (_collective, Finding("refused", "CollectiveReduceV2 of bfloat16")),
        (lambda x: _collective(x, dtype=tf.int32), Finding("refused", "CollectiveReduceV2 of int32")),
        (
            lambda x: _collective(x, "CollectiveAllToAllV2", hint="nccl"),
            Finding("refused", "NCCL: CollectiveAllToAllV2 of bfloat16"),
        ),
        (
            lambda x: _collective(x, "CollectiveReduceScatterV2", tf.float32),
            Finding("refused", "CollectiveReduceScatterV2 on the ring"),
        ),
        (lambda x: tf.zeros(tf.cast(x[:2], tf.int32)), Finding("to the host", "int32 Cast -> Fill")),
        (lambda x: tf.cast(tf.raw_ops.Size(input=x), tf.float32), Finding("to the GPU", "int32 Size -> Cast")),
        (lambda x: tf.function(lambda y: y + 1, jit_compile=True)(x), Finding("compiled", "without collectives")),
        (
            lambda x: tf.function(lambda y: tf.pad(tf.cast(y, tf.int64), [[0, 1]]))(x),
            Finding("missing", "Pad(int64,int32) -> (int64)"),
        ),
    ],
)
def test_what_the_audit_is_for(function, finding):
    assert finding in findings(_graph_of(function))


def test_edges_between_devices():
    def across(x):
        doubled = 2 * x
        with tf.device("CPU:2"):
            tripled = 3 * doubled
        with tf.device("CPU:0"):
            return 5 * tripled

    found = findings(_graph_of(across))
    assert Finding("across", "GPU to GPU: float32 Mul -> Mul") in found
    assert Finding("across", "GPU to host: float32 Mul -> Mul") in found
