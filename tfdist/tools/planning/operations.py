"""Operations of TensorFlow and memory: whose output is an input's buffer, and who may take one over."""

import math

import tensorflow as tf

from tfdist.extensions.pipeline.stages.flops import formula_of, trips
from tfdist.graphs import tape
from tfdist.placements.graph_facts import LEAVES
from tfdist.placements.kernels import CROSSENTROPIES, may_overwrite, passes_its_buffer_on


def alias_of(operation: tf.Operation, number: int) -> int | None:
    """Returns the number of the input whose buffer is the output of that number; None: it has its own."""
    if passes_its_buffer_on(operation.type):
        return 0
    if operation.type == "IdentityN":
        return number
    if operation.type in tape.LOOPS and number < len(operation.inputs):
        passed = tape.loop_invariants(operation, operation.inputs[number])
        return number if any(tape.same(one, operation.outputs[number]) for one in passed) else None
    return None


def taking_output(operation: tf.Operation) -> int | None:
    """Returns the number of the output that the operation may write into an input that nobody else needs: of a cross-entropy the
    gradient, over its logits; None: none."""
    if operation.type in CROSSENTROPIES:
        return 1
    return 0 if operation.type == "AssignVariableOp" or may_overwrite(operation.type) else None


def is_product(operation: tf.Operation) -> bool:
    """Whether the operation multiplies matrices, or convolves."""
    return operation.type in tape.LOOPS or formula_of(operation.type) is not None


def output_bytes(operation: tf.Operation) -> list[int | None]:
    """Returns the bytes of each output that is no other's; None where a size is known only when it runs."""
    if operation.type in LEAVES or operation.type == "BroadcastGradientArgs":  # which returns numbers of axes
        return [0] * len(operation.outputs)
    if operation.type in tape.LOOPS:
        return [_of_loop(operation, number) for number in range(len(operation.outputs))]
    if operation.type == "CollectiveReduceScatterV2":  # of its shape TensorFlow does not know how many share it
        whole, ranks = tensor_bytes(operation.inputs[0]), tf.get_static_value(operation.inputs[1])
        return [None if whole is None or ranks is None else whole // int(ranks)]
    if operation.type == "TensorListFromTensor":  # copies its rows
        return [tensor_bytes(operation.inputs[0])]
    if operation.type == "ZerosLike" and operation.outputs[0].dtype == tf.variant:
        return [_of_list(operation.inputs[0])]
    return [tensor_bytes(output) for output in operation.outputs]


def _of_list(tensor: tf.Tensor) -> int | None:
    """Returns the bytes of a list's tensors."""
    while alias_of(tensor.op, tensor.value_index) is not None and tensor.op.type not in tape.LOOPS:
        tensor = tensor.op.inputs[0]
    return output_bytes(tensor.op)[tensor.value_index]


def tensor_bytes(tensor: tf.Tensor) -> int | None:
    """Returns the bytes of a tensor; 0 for handles, lists and strings, None where a size is not known."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return math.prod(tensor.shape) * tensor.dtype.size if tensor.shape.is_fully_defined() else None


def scratch_bytes(operation: tf.Operation) -> int:
    """Returns the bytes of what the body of a loop holds besides what it returns: all its tensors, which is the most."""
    if operation.type not in tape.LOOPS:
        return 0
    inside = [one for one in tape.body(operation).get_operations() if one.type not in LEAVES]
    return sum(tensor_bytes(x) or 0 for one in inside if not passes_its_buffer_on(one.type) for x in one.outputs)


def _of_loop(loop: tf.Operation, number: int) -> int | None:
    """Returns the bytes of an output of a loop: of a list, what the trips put into it.

    What a trip hands to the next, and that puts into a list, is there as often as the loop runs. What is put into several lists
    is counted in the last: those of the gradient come last, and stay longest.
    """
    output = loop.outputs[number]
    if output.dtype != tf.variant:
        return tensor_bytes(output)
    inside = tape.body(loop)
    item, *later = (_put(inside, place) for place in range(number, len(loop.outputs)))
    if item is None or any(other is not None and tape.same(other, item) for other in later):
        return 0
    times, size = trips(loop), tensor_bytes(item)
    return None if times is None or size is None else size * times


def _put(body: tf.Graph, number: int) -> tf.Tensor | None:
    """Returns the tensor of a loop's body that each trip puts into the list `number`; None: none that a trip makes."""
    put = body.outputs[number]
    while put.op.type == "Identity":
        put = put.op.inputs[0]
    if put.op.type not in ("TensorListPushBack", "TensorListSetItem"):
        return None
    given = {x.name: place for place, x in enumerate(body.inputs)}
    item, seen = put.op.inputs[-1], set()
    while item.name not in seen:
        seen.add(item.name)
        if passes_its_buffer_on(item.op.type) and item.op.inputs:
            item = item.op.inputs[0]
        elif item.name in given and given[item.name] < len(body.outputs):  # the trip before has handed it on
            item = body.outputs[given[item.name]]
        else:
            return None if item.op.type in LEAVES else item
    return None  # what was there before the loop
