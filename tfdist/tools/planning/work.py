"""The work of a traced training step: the operations of forward and backward, with their FLOPs and the bytes that they move."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.extensions.pipeline.stages.flops import elements, flops_of_operation
from tfdist.graphs import tape
from tfdist.placements.graph_facts import LEAVES
from tfdist.placements.kernels import CROSSENTROPIES, SERIES, looks_up
from tfdist.tools.planning import operations
from tfdist.tools.planning.hardware import Hardware
from tfdist.tools.planning.lifetimes import between
from tfdist.tools.planning.step_profile import owners_of
from tfdist.tools.planning.step_trace import StepTrace

# Cross-entropy of logits is five expressions after another, which read them five times and write twice; two of them are
# functions (TensorFlow's `xent_op.h`). That of the gradient CPUs compute one element at a time, not eight or sixteen at once.
_CROSSENTROPY_PASSES, _CROSSENTROPY_FUNCTIONS = 7.0, 9.0
# How many times as long as a copy TensorFlow takes on a CPU to transpose: 2 in a process alone, 4 beside three others (AVX-512).
_TRANSPOSING = 3.0
# What the executor has measured to cost less than 8,000 cycles runs inline: about the bytes that are moved in that time.
_INLINE_BYTES = 2**16
_COMPUTED = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """The operations of a step, in the order of the trace; arrays have an element for each operation.

    Attributes:
        batch_sizes: of the two traces.
        places: of the operations in the graph.
        figures: of each trace FLOPs, bytes read and written, bytes read and written to transpose the operands of a product, and
            elements of exp, tanh and their like that are computed, float64 (2, 4, operations).
        dtypes: the name of what each operation computes in.
        is_product: whether it multiplies matrices, or convolves.
        calls: the number of the layer's call that it belongs to, forward or backward.
        is_forward: whether it belongs to forward.
        is_again: whether it is one of forward that a layer which is computed again repeats: what its own backward needs.
        stands_for: for each call of a layer the number of the one that was traced in its place: itself, or an equal one.
    """

    batch_sizes: tuple[int, int]
    places: np.ndarray
    figures: np.ndarray
    dtypes: np.ndarray
    is_product: np.ndarray
    calls: np.ndarray
    is_forward: np.ndarray
    is_again: np.ndarray
    stands_for: tuple[int, ...]

    def seconds(self, batch_size: float, hardware: Hardware, *, divided: np.ndarray | None = None, ranks: int = 1) -> "Seconds":
        """Returns how long the operations take on one device, one after another.

        Args:
            batch_size: how many examples.
            hardware: what the device can do.
            divided: for each operation of the graph whether tensor ranks share its work; None: they share nothing.
            ranks: among how many.
        """
        share = 1.0 if divided is None else np.where(divided[self.places], 1 / ranks, 1.0)
        flops, moved, transposed, functions = between(self.figures, self.batch_sizes, batch_size) * share
        moving, computing = moved / hardware.bytes_per_second, functions * hardware.function_seconds
        for place in np.flatnonzero(self.is_product):
            dtype = str(self.dtypes[place])
            rate = hardware.flops_per_second(dtype if dtype in hardware.matmul else "float32", float(flops[place]))
            computing[place] = flops[place] / rate
        # A GPU computes while it moves. A core brings bytes to it first, of which rates and functions in its caches say nothing.
        seconds = np.maximum(moving, computing) if hardware.is_gpu else moving + computing
        seconds += (1.0 if hardware.is_gpu else _TRANSPOSING) * transposed / hardware.bytes_per_second
        each = hardware.operation_seconds
        seconds = np.maximum(seconds, each) if hardware.is_gpu else seconds + np.where(moved < _INLINE_BYTES, 0.0, each)
        count, traced = len(self.stands_for), np.array(self.stands_for)
        parts = (self.is_forward, ~self.is_forward, self.is_again)
        return Seconds(*(np.bincount(self.calls[chosen], seconds[chosen], count)[traced] for chosen in parts))

    def totals(self, batch_size: float) -> dict[str, Any]:
        """Returns what a CPU computes, of all operations together: "functions", "moved" bytes, those that are transposed as often
        as that takes longer, how many operations are "large"; and of each of the "products" its FLOPs."""
        flops, moved, transposed, functions = between(self.figures, self.batch_sizes, batch_size)
        return {
            "products": flops[self.is_product].tolist(),
            "functions": float(functions.sum()),
            "moved": float((moved + _TRANSPOSING * transposed).sum()),
            "large": int((moved >= _INLINE_BYTES).sum()),
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Seconds:
    """How long each call of a layer takes, forward, backward, and to be computed again for backward, float64 (calls,)."""

    forward: np.ndarray
    backward: np.ndarray
    again: np.ndarray


def work_of(traces: Sequence[StepTrace]) -> Work:
    """Returns the work of a step, of its traces for two sizes of the batch."""
    graphs = [trace.graph.get_operations() for trace in traces]
    ops, first = graphs[0], traces[0]
    results = [first.graph.get_tensor_by_name(name) for name in first.gradients]
    needed = tape.ancestors(results, ops)
    places = [place for place, one in enumerate(ops) if one in needed and not _is_free(one)]
    owners = owners_of(first)
    measures = (flops_of_operation, _moved, transposed_bytes, _functions)
    return Work(
        batch_sizes=(traces[0].batch_size, traces[-1].batch_size),
        places=np.array(places),
        figures=np.array([[[float(of(graph[place])) for place in places] for of in measures] for graph in graphs]),
        dtypes=np.array([_dtype(ops[place]) for place in places]),
        is_product=np.array([operations.is_product(ops[place]) for place in places], bool),
        calls=owners[places],
        is_forward=np.array([place < first.forward for place in places], bool),
        is_again=_again(first, ops, owners)[places],
        stands_for=tuple(first.calls.index(call.stands_for or call) for call in first.calls),
    )


def _again(trace: StepTrace, ops: Sequence[tf.Operation], owners: np.ndarray) -> np.ndarray:
    """Returns for each operation whether it is of forward and the backward of the same call needs it: as nobody reads the others
    when a block is computed again, TensorFlow drops them, such as its last product."""
    numbers = {one: place for place, one in enumerate(ops)}
    is_again = np.zeros(len(ops), bool)
    for place in range(len(ops) - 1, -1, -1):
        if place < trace.forward and not is_again[place]:
            continue
        for x in ops[place].inputs:
            source = numbers[x.op]
            is_again[source] |= source < trace.forward and owners[source] == owners[place]
    return is_again


def _is_free(operation: tf.Operation) -> bool:
    return operation.type in LEAVES or operation.type == "Const" or operations.alias_of(operation, 0) is not None


def _dtype(operation: tf.Operation) -> str:
    names = [x.dtype.name for x in (*operation.outputs, *operation.inputs)]
    return next((name for name in names if name in _COMPUTED), "float32")


def _functions(operation: tf.Operation) -> float:
    computed = elements(operation.outputs[-1].shape) if operation.type in SERIES else 0
    return _CROSSENTROPY_FUNCTIONS * computed if operation.type in CROSSENTROPIES else float(computed)


def _moved(operation: tf.Operation) -> float:
    """Returns the bytes of what the operation reads and writes; of a lookup those of what it writes, twice."""
    written = sum(operations.tensor_bytes(x) or 0 for x in operation.outputs)
    if operation.type in CROSSENTROPIES:
        return _CROSSENTROPY_PASSES * (operations.tensor_bytes(operation.outputs[-1]) or 0)
    if looks_up(operation.type):
        return 2.0 * written
    return float(written + sum(operations.tensor_bytes(x) or 0 for x in operation.inputs))


def transposed_bytes(operation: tf.Operation) -> float:
    """Returns the bytes that an `Einsum` reads and writes to transpose its operands and its result; 0 of other operations.

    A product of two terms is one of batches of matrices. A term lies as they do if the labels that all have come first, then
    those that it alone has and those that are summed over, in either order: "abc" times "cde" needs nothing, in "aecd" times
    "abcd" to "acbe" both terms are transposed. Source: TensorFlow's `einsum_op_impl.h`, `ReduceOperand`.
    """
    if operation.type != "Einsum" or len(operation.inputs) != 2:
        return 0.0
    given, _, result = operation.get_attr("equation").decode().replace("...", "").partition("->")
    one, other = given.split(",")
    batch = [label for label in result if label in one and label in other]
    summed = set(one) & set(other) - set(result)
    product = [*batch, *(x for x in one + other if x not in batch and x not in summed)]
    tensors = [x for term, x in zip((one, other), operation.inputs, strict=True) if not _is_in_order(term, batch, summed)]
    if list(result) != product:
        tensors.append(operation.outputs[0])
    return 2.0 * sum(operations.tensor_bytes(x) or 0 for x in tensors)


def _is_in_order(term: str, batch: list[str], summed: set[str]) -> bool:
    """Whether a term's labels are those of the batch, then its own and the summed ones, each together."""
    if list(term[: len(batch)]) != batch:
        return False
    kinds = [label in summed for label in term[len(batch) :]]
    return sum(one != other for one, other in itertools.pairwise(kinds)) <= 1
