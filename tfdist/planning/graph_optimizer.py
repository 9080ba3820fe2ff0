"""What TensorFlow's graph optimizer changes in a step before it runs, as far as it moves memory.

    C * (X * Y)  becomes  X * (C * Y)    a constant is pushed down (Grappler's constant folding, `ConstantPushDown`)
    1 * X        becomes  X              (`SimplifyArithmeticOperations`)

The gradient of attention ends so: C is the scale of the scores, Y their softmax. C * Y is computed as soon as there is Y, in
forward, and kept beside it for backward. In a pipeline forward and backward of a stage are functions of their own: what one of
them computes is not moved to the other. A product with one is in the gradient of swish, `tf.nn.silu`, whose slope is one.
"""

from collections.abc import Iterator, Sequence

import tensorflow as tf


def pushed_down(operations: Sequence[tf.Operation]) -> Iterator[tuple[tf.Operation, list[tf.Tensor]]]:
    """Yields the operations whose inputs change, with their new inputs."""
    for parent in operations:
        if parent.type != "Mul" or len(parent.inputs) != 2:
            continue
        constant, product = sorted(parent.inputs, key=lambda x: x.op.type != "Const")
        child = product.op
        if constant.op.type != "Const" or constant.shape.rank != 0 or child.type != "Mul":
            continue
        x, y = child.inputs
        if "Const" in (x.op.type, y.op.type) or not _are_alike(x, y, product, parent.outputs[0]):
            continue
        if len(product.consumers()) == 1:
            yield child, [constant, y]
            yield parent, [x, product]


def unchanged(operation: tf.Operation) -> int | None:
    """Returns the number of the input that the operation returns as it is; None: it computes."""
    if operation.type != "Mul" or len(operation.inputs) != 2:
        return None
    for number, factor in enumerate(operation.inputs):
        is_scalar = factor.op.type == "Const" and factor.shape.rank == 0
        if is_scalar and tf.get_static_value(factor) == 1 and _are_alike(operation.inputs[1 - number], operation.outputs[0]):
            return 1 - number
    return None


def _are_alike(*tensors: tf.Tensor) -> bool:
    return len({tuple(x.shape) for x in tensors}) == 1 and tensors[0].shape.is_fully_defined()
