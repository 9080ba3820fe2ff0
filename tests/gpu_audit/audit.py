"""What a traced step would do on GPUs that TensorFlow cannot do there, or that makes the host and a GPU wait for each other.

Kinds of findings:

    missing      an operation for a GPU, without a kernel for its dtypes there: it runs on the host, with copies both ways
    refused      a collective of a dtype, or with a way to merge, that TensorFlow does not have on GPUs: the step fails
    python       a call of Python, by every rank and in every step
    to the host  a tensor in a GPU's memory that a kernel on that GPU wants in the host's: the host waits for the GPU
    to the GPU   the reverse, a copy that the GPU waits for
    across       an edge between two ranks' GPUs, or between a GPU and an operation of the host
    unplaced     an operation without a device that has a GPU kernel: it goes to the first GPU, whoever needs it
    compiled     a function for XLA
"""

from __future__ import annotations

import collections
import dataclasses

import tensorflow as tf

from tests.gpu_audit import registry
from tests.gpu_audit.graphs import HOST, NOWHERE, Placed, Walk
from tests.gpu_audit.registry import ARGUMENTS, CALLS, ON_HOST

# NcclManager's dtypes, and what BaseCollectiveExecutor refuses on GPUs for every implementation (TensorFlow 2.21).
NCCL_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
REFUSED_ALL_REDUCES = (tf.bfloat16, tf.int32)
MERGES = {"Add": "Add", "Max": "Maximum", "Min": "Minimum"}  # `merge_op` and the operation whose kernel the ring runs
PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
NO_KERNEL = (*ARGUMENTS, "NoOp")


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    kind: str
    what: str


@dataclasses.dataclass
class Occurrences:
    """How often a finding occurs, by device ("gpu:0", ...), and an operation where it does."""

    example: str
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def most(self) -> int:
        """On one device."""
        return max(self.counts.values())


def findings(graph: tf.Graph) -> dict[Finding, Occurrences]:
    """Returns what is found in `graph` and its functions."""
    found: dict[Finding, Occurrences] = {}
    folded = Folded()
    for placed in Walk(graph):
        for finding in _of(placed, folded):
            occurrences = found.setdefault(finding, Occurrences(placed.operation.name))
            occurrences.counts[placed.device] += 1
    return found


class Folded:
    """Which operations are computed before the step: they follow from constants."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}

    def __call__(self, operation: tf.Operation) -> bool:
        stack = [operation]
        while stack:
            one = stack[-1]
            before = [x.op for x in one.inputs] if one.type not in (*CALLS, *ARGUMENTS) else []
            unknown = [x for x in before if id(x) not in self._known]
            if unknown:
                stack += unknown
                continue
            self._known[id(one)] = one.type == "Const" or bool(before) and all(self._known[id(x)] for x in before)
            stack.pop()
        return self._known[id(operation)]


def _of(placed: Placed, folded: Folded) -> list[Finding]:
    operation, device = placed.operation, placed.device
    found = []
    if operation.type in PYTHON:
        found.append(Finding("python", f"{operation.type} on {device or 'no device'}"))
    if operation.type in CALLS and _flag(operation, "_XlaMustCompile"):
        inner = {one.operation.type for one in Walk(placed.called()[0])}
        with_what = [name for name in sorted(inner) if name.startswith("Collective")]
        found.append(Finding("compiled", f"with {', '.join(with_what)}" if with_what else "without collectives"))
    if device == NOWHERE and operation.type not in (*NO_KERNEL, *CALLS) and registry.kernel_of(operation) is not None:
        found.append(Finding("unplaced", operation.type))
    if device.startswith("gpu"):
        found += _refusals(operation) if operation.type.startswith("Collective") else []
        found += _on_gpu(placed, folded)
    elif device == HOST:
        for x in operation.inputs:
            if placed.device_of(x).startswith("gpu") and not registry.output_is_on_host(x):
                found.append(Finding("across", f"GPU to host: {_edge(x, operation)}"))
    return found


def _on_gpu(placed: Placed, folded: Folded) -> list[Finding]:
    operation, device = placed.operation, placed.device
    if operation.type in NO_KERNEL:
        return []
    if operation.type not in CALLS and registry.kernel_of(operation) is None:
        return [Finding("missing", signature(operation))]
    found = []
    for place, x in enumerate(operation.inputs):
        source = placed.device_of(x)
        if x.dtype in ON_HOST or folded(x.op) or source == NOWHERE:
            continue
        if source != device:
            if source != HOST or not registry.input_is_on_host(operation, place):
                where = "host to GPU" if source == HOST else "GPU to GPU"
                found.append(Finding("across", f"{where}: {_edge(x, operation)}"))
            continue
        wanted, is_there = registry.input_is_on_host(operation, place), registry.output_is_on_host(x)
        if wanted != is_there:
            found.append(Finding("to the host" if wanted else "to the GPU", _edge(x, operation)))
    return found


def _refusals(operation: tf.Operation) -> list[Finding]:
    dtype, hint = operation.get_attr("T"), operation.get_attr("communication_hint").decode()
    refused = []
    if hint == "nccl" and dtype not in NCCL_DTYPES:
        refused.append(f"NCCL: {operation.type} of {dtype.name}")
    if operation.type == "CollectiveReduceV2" and dtype in REFUSED_ALL_REDUCES:
        refused.append(f"{operation.type} of {dtype.name}")
    if hint != "nccl" and operation.type == "CollectiveReduceScatterV2":
        refused.append(f"{operation.type} on the ring")
    if operation.type in ("CollectiveReduceV2", "CollectiveReduceScatterV2"):
        merge = MERGES[operation.get_attr("merge_op").decode()]
        if not registry.has_kernel(merge, T=dtype):
            refused.append(f"{merge} of {dtype.name} in {operation.type}")
    return [Finding("refused", what) for what in refused]


def signature(operation: tf.Operation) -> str:
    names = [",".join(x.dtype.name for x in tensors) for tensors in (operation.inputs, operation.outputs)]
    return f"{operation.type}({names[0]}) -> ({names[1]})"


def _edge(x: tf.Tensor, operation: tf.Operation) -> str:
    return f"{x.dtype.name} {x.op.type} -> {operation.type}"


def _flag(operation: tf.Operation, name: str) -> bool:
    attributes = operation.node_def.attr
    return name in attributes and attributes[name].b
