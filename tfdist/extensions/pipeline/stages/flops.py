"""The floating-point operations of a TensorFlow graph, by the shapes of its tensors, without running it.

| operation | FLOPs |
|---|---|
| MatMul, BatchMatMul, Einsum | 2 for each product of two elements |
| convolutions | 2 for each weight that an output, of a transposed one an input, meets |
| loops | the body's, times the trips; when they are not known, the steps of the sequences that the loop reads |
| branches | those of the most expensive one |
| what only moves or makes values: gathers, transposes, casts, constants | 0 |
| everything else | 1 for each floating-point element of its outputs |

Sizes that are not known count as `UNKNOWN_SIZE`.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from tfdist.graphs import tape
from tfdist.placements.call import Rule
from tfdist.placements.graph_facts import LEAVES
from tfdist.placements.kernels import only_moves
from tfdist.placements.rules import products
from tfdist.placements.table import Kind, row_of

UNKNOWN_SIZE = 128


def elements(shape: tf.TensorShape | Sequence[int | None]) -> int:
    """Returns how many elements a tensor has; each unknown size counts as `UNKNOWN_SIZE`, and so does an unknown rank."""
    return math.prod(_sizes(shape))


def flops_of(outputs: Iterable[tf.Tensor], among: Sequence[tf.Operation]) -> int:
    """Returns the FLOPs of those operations of `among`, all of one graph, that `outputs` depend on."""
    return sum(map(flops_of_operation, tape.ancestors(list(outputs), among, by_control=False)))


def flops_of_operation(operation: tf.Operation) -> int:
    """Returns the FLOPs of one run of an operation."""
    if operation.type in tape.LOOPS:
        times = trips(operation)
        return (UNKNOWN_SIZE if times is None else times) * _of_function(operation, operation.get_attr("body").name)
    if (formula := formula_of(operation.type)) is not None:
        return formula(operation)
    if only_moves(operation.type) or operation.type in (*LEAVES, "Const", "IdentityN"):
        return 0
    values = operation.node_def.attr.values()
    called = [function.name for value in values for function in (value.func, *value.list.func) if function.name]
    if called:  # one function, or the branches of a condition
        return max(_of_function(operation, name) for name in called)
    return sum(elements(x.shape) for x in operation.outputs if x.dtype.is_floating or x.dtype.is_complex)


def _of_function(operation: tf.Operation, name: str) -> int:
    """Returns the FLOPs of one call of the function `name`, which `operation` calls."""
    graph = operation.graph
    function = graph._get_function(name)  # private to TensorFlow: tests/extensions/pipeline/test_flops.py fails when it changes
    while function is None:
        graph = graph.outer_graph
        function = graph._get_function(name)
    body = function.graph
    return flops_of(body.outputs, body.get_operations())


def trips(loop: tf.Operation) -> int | None:
    """Returns how often the body of a loop runs, in a gradient as in forward; None where that is known only when it runs."""
    known = tf.get_static_value(loop.inputs[1])  # the most iterations; -1: no limit
    if known is not None and known >= 0:
        return int(known)
    lists = [x.op.inputs[0].shape for x in loop.inputs if x.op.type == "TensorListFromTensor"]
    steps = [shape[0] for shape in lists if shape.rank and shape[0] is not None]
    if steps:
        return max(steps)
    of_forward = [x.op for x in loop.inputs if x.op.type in tape.LOOPS and x.op is not loop]
    return trips(of_forward[0]) if of_forward else None


def _matmul(operation: tf.Operation) -> int:
    is_transposed = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
    contracted = _sizes(operation.inputs[0].shape)[-2 if is_transposed else -1]
    return 2 * elements(operation.outputs[0].shape) * contracted


def _einsum(operation: tf.Operation) -> int:
    """Counts a product for every combination of the labels; the batch axes of an ellipsis are those of the output."""
    terms, _, result = operation.get_attr("equation").decode().partition("->")
    sizes: dict[str, int] = {}
    for term, x in zip([*terms.split(","), result], [*operation.inputs, operation.outputs[0]], strict=True):
        left, dots, right = term.partition("...")
        shape = _sizes(x.shape)
        sizes.update(zip(left, shape, strict=False))
        sizes.update(zip(reversed(right), reversed(shape), strict=False))
        sizes["..."] = math.prod(shape[len(left) : len(shape) - len(right)]) if dots else 1
    return 2 * math.prod(sizes.values()) if len(operation.inputs) > 1 else elements(operation.inputs[0].shape)


def _convolution(operation: tf.Operation) -> int:
    """Counts for each output (of a transposed one, input) a product with all of the filter but its axes of the same channels."""
    x = operation.inputs[2] if "Backprop" in operation.type else operation.outputs[0]
    weights = operation.outputs[0] if "BackpropFilter" in operation.type else operation.inputs[1]
    num_own_axes = 2 if operation.type.startswith("Depthwise") else 1
    return 2 * elements(x.shape) * math.prod(_sizes(weights.shape)[:-num_own_axes])


def _cudnn_rnn(operation: tf.Operation) -> int:
    """Counts a product with all parameters for every step; only a GPU has this operation."""
    return 2 * math.prod(_sizes(operation.inputs[0].shape)[:2]) * elements(operation.inputs[3].shape)


def _sizes(shape: tf.TensorShape | Sequence[int | None]) -> list[int]:
    shape = tf.TensorShape(shape)
    return [UNKNOWN_SIZE] if shape.rank is None else [UNKNOWN_SIZE if size is None else size for size in shape]


_FORMULAS: dict[Rule, Callable[[tf.Operation], int]] = {products.matmul: _matmul, products.einsum: _einsum}


def formula_of(kind: str) -> Callable[[tf.Operation], int] | None:
    """Returns how the FLOPs of a product, or a convolution, are counted; None: such an operation is neither."""
    row = row_of(kind)
    if row.kind is not Kind.PRODUCT or row.rule is products.bias_add:
        return _cudnn_rnn if kind.startswith("CudnnRNN") else None
    return _FORMULAS.get(row.rule, _convolution)
