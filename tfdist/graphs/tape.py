"""The private parts of TensorFlow's gradient tape that sharded reads need, in one place.

`tf.custom_gradient` would do, but its gradient function cannot say "this variable was not used" per variable, and it hides
which tensor the consumers see.
"""

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import record
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import control_flow_util_v2, default_gradient, handle_data_util, resource_variable_ops, while_v2
from tensorflow.python.ops.parallel_for import pfor

from tfdist.custom_gradients import as_read

LOOPS = ("While", "StatelessWhile")
BRANCHES = ("Case", "If", "StatelessCase", "StatelessIf")
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
Reads: TypeAlias = Mapping[tuple[str, int], tf.Tensor]  # what an operation, by its name, is to read as its input of a number
_WITHOUT_VALUE = "_tfdist_is_without_value"  # of variables that hold none
_RECONNECTED = "_tfdist_reconnected"  # of graphs
_CALLS_FUNCTIONS: dict[str, bool] = {}  # types of operations, as they are met: whether they call functions

stop_recording = record.stop_recording
# (name, outputs, inputs, gradient), lists: tells the active tapes that outputs come from inputs; `gradient(*upstream)` goes back.
record_gradient = record.record_operation


def handle_without_value(variable: tf.Variable) -> tf.Variable:
    """Returns something with a handle of the shape and dtype of `variable`, by which tapes can know it; it holds no value."""
    name = f"{variable.name.partition(':')[0]}/whole"
    return variable_without_value(variable.shape, variable.dtype, variable.trainable, name, variable.device)


def variable_without_value(
    shape: Sequence[int], dtype: tf.DType, trainable: bool, name: str | None, device: str | None = None
) -> tf.Variable:
    """Returns a variable that holds no value: to be traced with, not to be computed with."""
    with tf.init_scope(), tf.device(device):
        made: tf.Variable = resource_variable_ops.UninitializedVariable(trainable=trainable, shape=shape, dtype=dtype, name=name)
    made.__class__ = resource_variable_ops.ResourceVariable  # on whose handle TensorFlow notes what container it is in
    setattr(made, _WITHOUT_VALUE, True)
    return made


def is_without_value(variable: tf.Variable) -> bool:
    """Whether `variable`, or what it is on each device, was made by `variable_without_value`: no device is asked."""
    return all(getattr(one, _WITHOUT_VALUE, False) for one in getattr(variable, "values", (variable,)))


def read_of(variable: tf.Variable, value: tf.Tensor) -> tf.Tensor:
    """Returns `value` as what is read from `variable`, to the gradient tapes that watch it or watch what is read."""
    if tf.executing_eagerly() and not is_recording():
        return value
    resource_variable_ops.variable_accessed(variable)
    return as_read(value, variable.handle)


def zeros_of_variable(handle: tf.Tensor) -> tf.Tensor | None:
    """Returns zeros of the shape that the variable of `handle` is known to have; None where it is no variable's, or not known."""
    if handle.dtype != tf.resource or not default_gradient.supports_default_grad(handle):
        return None
    shape, dtype = default_gradient.shape_and_dtype(handle)
    return tf.zeros(shape, dtype) if shape.is_fully_defined() else None


def tapes_watching(tensors: Sequence[tf.Tensor]) -> int:
    """Returns 0, 1 or 2 when no, one or several active tapes would record an operation on `tensors`."""
    return pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(list(tensors))


def is_backward(operation: tf.Operation) -> bool:
    """Whether a gradient tape (or `tf.gradients`) made `operation`; both name their operations so."""
    return "gradient_tape/" in operation.name or operation.name.startswith("gradients/") or "/gradients/" in operation.name


def backward_scope(name: str = "") -> contextlib.AbstractContextManager[None]:
    """Names operations of a gradient function of our own as a tape names those of TensorFlow's, below `name` if there is one."""
    # With the slash at the end: this one, and no second one of another name.
    return tf.compat.v1.name_scope(f"gradient_tape/{name}/" if name else "gradient_tape/")


def users_scope(name: str) -> str:
    """Returns `name`, of a user's `tf.name_scope`, such that nothing in it is taken for what a tape or `vectorized_map` made."""
    return name.replace("gradient_tape", "grad_tape").replace("gradients", "grads").replace("loop_body", "body")


def is_recording() -> bool:
    """Whether a tape records here, whatever it watches."""
    return record.could_possibly_record()


def in_backward() -> bool:
    """Whether what is traced here is a gradient function that stands in `backward_scope`."""
    return "gradient_tape" in tf.compat.v1.get_default_graph().get_name_scope()


def in_vectorized_map() -> bool:
    """Whether what is traced here is the function of a `tf.vectorized_map`, or the gradient of a `tape.jacobian`."""
    return "loop_body" in tf.compat.v1.get_default_graph().get_name_scope()


def same_for_all_rows(operations: Sequence[tf.Operation]) -> None:
    """Lets a `tf.vectorized_map` in whose function `operations` are made take their results as they are, for all rows.

    It would put operations with an effect in a loop.
    """
    for operation in operations:
        operation.pfor_converter = lambda converted: [pfor.wrap(output, False) for output in converted.op.outputs]


def stand_in(dtype: tf.DType, shape: Sequence[int]) -> tf.Tensor:
    """Returns a tensor that another one is to take the place of: the first input of its operation is nothing.

    Made so that nobody looks at it before: `tf.debugging.enable_check_numerics` puts a check after what is made in other ways.
    """
    graph, kind = tf.compat.v1.get_default_graph(), tf.compat.v1.AttrValue(type=dtype.as_datatype_enum)
    attributes = {"dtype": kind, "shape": tf.compat.v1.AttrValue(shape=tf.TensorShape(shape).as_proto())}
    nothing = graph._create_op_internal("Placeholder", [], dtypes=[dtype], attrs=attributes)  # noqa: SLF001
    return graph._create_op_internal("Identity", nothing.outputs, dtypes=[dtype], attrs={"T": kind}).outputs[0]  # noqa: SLF001


def same(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether both are the same tensor of one graph; an operation whose inputs changed hands out new Python objects."""
    return one is other or one.name == other.name


def loop_invariants(operation: tf.Operation, tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the outputs of a while loop that are `tensor` itself, an input which the loop's body passes on unchanged."""
    if operation.type not in LOOPS:
        return []
    inside = body(operation)
    unchanged = []
    # Not strict: the gradient adds inputs and outputs to a loop, at its end, and not the same number of each.
    for passed, source, given, result in zip(operation.outputs, operation.inputs, inside.inputs, inside.outputs, strict=False):
        while result.op.type == "Identity":
            result = result.op.inputs[0]
        if same(source, tensor) and same(result, given):
            unchanged.append(passed)
    return unchanged


def body(operation: tf.Operation) -> tf.Graph:
    """Returns the graph of the body of a traced loop, to be looked at; its inputs and outputs are those of the loop, in order."""
    return while_v2._get_graph(operation, "body", "_body_graph")  # noqa: SLF001


def condition(operation: tf.Operation) -> tf.Graph:
    """Returns the graph of the condition of a traced loop, to be looked at; its inputs are those of the loop, in order."""
    return while_v2._get_graph(operation, "cond", "_cond_graph")  # noqa: SLF001


def made_for_loops(operations: Sequence[tf.Operation], since: int) -> set[tf.Operation]:
    """Returns those from number `since` on of a graph's `operations` that loops of forward need: the gradient of a loop lets it
    keep what it computes, and makes operations for that."""
    loops = [op for op in operations if op.type in LOOPS and not is_backward(op)]
    return ancestors([tensor for loop in loops for tensor in loop.inputs], operations[since:] if loops else [])


def branches(operation: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of both branches of a traced `tf.cond`, to be looked at; their inputs are its own after the first."""
    shapes = [tensor.shape for tensor in operation.inputs[1:]]
    names = [operation.get_attr(f"{branch}_branch").name for branch in ("then", "else")]
    return [control_flow_util_v2.get_func_graph(operation, shapes, name) for name in names]


def called(operation: tf.Operation) -> tf.Graph | None:
    """Returns the graph of the function that an operation calls, to be looked at; None: it calls none, or has control flow."""
    if operation.type not in CALLS:
        return None
    shapes = [tensor.shape for tensor in operation.inputs]
    graph = control_flow_util_v2.get_func_graph(operation, shapes, operation.get_attr("f").name)
    for outside, inside in zip(operation.inputs, graph.inputs, strict=False):
        if outside.dtype == tf.resource:  # a function of a SavedModel does not know the shapes of its weights
            handle_data_util.copy_handle_data(outside, inside)
            for read in (op.outputs[0] for op in inside.consumers() if op.type == "ReadVariableOp"):
                read.set_shape(handle_data_util.get_resource_handle_data(inside).shape_and_type[0].shape)
    return graph


def traced_branches(operation: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs in which the branches of a `tf.cond` or `tf.switch_case` were traced; none of a copy."""
    cases = range(len(operation.get_attr("branches"))) if operation.type.endswith("Case") else ()
    names = [f"_branch_graph_{number}" for number in cases] or ["_true_graph", "_false_graph"]
    return [getattr(operation, name) for name in names if hasattr(operation, name)]


def with_inputs(operation: tf.Operation, inputs: Sequence[tf.Tensor], graph: tf.Graph | None = None) -> tf.Operation:
    """Makes `operation` a second time, in its graph or in another one, with other `inputs`."""
    attributes = {name: value for name, value in operation.node_def.attr.items() if not name.startswith("_")}
    return (graph or operation.graph)._create_op_internal(
        operation.type,
        list(inputs),
        dtypes=[output.dtype for output in operation.outputs],
        attrs=attributes,
        name=f"{operation.name.rpartition('/')[2]}_again",
    )


def copy_all(operations: Sequence[tf.Operation], known: dict[str, tf.Tensor], reads: Reads = MappingProxyType({})) -> None:
    """Makes operations, in the order in which they were made, a second time in the graph that is being built.

    `known` says what tensors of their graph are here, by name; what is copied is added. `reads` says what an operation, by name,
    reads here as its input of that number, whatever it reads there.
    """
    graph = tf.compat.v1.get_default_graph()
    for operation in operations:
        inputs = [reads.get((operation.name, place)) for place in range(len(operation.inputs))]
        inputs = [known[x.name] if new is None else new for x, new in zip(operation.inputs, inputs, strict=True)]
        made = with_inputs(operation, inputs, graph)
        for output, new in zip(operation.outputs, made.outputs, strict=True):
            new.set_shape(output.shape)  # which may know more than the operation says
            known[output.name] = new


def can_be_made_again(operation: tf.Operation) -> bool:
    """Whether an operation, made a second time in its graph, gives the same again and does nothing else."""
    kinds = [tensor.dtype for tensor in (*operation.inputs, *operation.outputs)]
    return (
        operation.type not in ("Placeholder", "Const", "NoOp")
        and not any(dtype in (tf.resource, tf.variant) for dtype in kinds)
        and not _calls_functions(operation)
        and not auto_control_deps.op_is_stateful(operation)
    )


def run_after(operation: tf.Operation, other: tf.Operation) -> None:
    """Makes `operation` wait for `other`."""
    operation._add_control_inputs([other])


def reconnect(operation: tf.Operation, old: tf.Tensor, new: tf.Tensor) -> None:
    """Makes `operation` read `new` wherever it reads `old`."""
    for index, tensor in enumerate(operation.inputs):
        if same(tensor, old):
            operation._update_input(index, new)
    reconnected(operation.graph).append(operation)


def reconnected(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the operations of `graph` that were made to read something else, in that order."""
    if not hasattr(graph, _RECONNECTED):
        setattr(graph, _RECONNECTED, [])
    found: list[tf.Operation] = getattr(graph, _RECONNECTED)
    return found


def operations_so_far() -> int:
    """Returns how many operations the graph that is being built has; 0 where there is none."""
    return 0 if tf.executing_eagerly() else tf.compat.v1.get_default_graph().version


def operations_since(count: int) -> list[tf.Operation]:
    """Returns the operations made since `operations_so_far` returned `count`."""
    return [] if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_operations()[count:]


def ancestors(
    of: Sequence[tf.Tensor | tf.Operation], among: Sequence[tf.Operation], *, by_control: bool = True
) -> set[tf.Operation]:
    """Returns the operations of `among` that those `of` depend on, by way of operations of `among` only; `of` may be among them.

    With `by_control` control inputs are followed, too.
    """
    allowed, found = set(among), set()
    waiting = [one if isinstance(one, tf.Operation) else one.op for one in of]
    waiting = [before for op in waiting for before in (op, *inputs_of(op))] if by_control and allowed else waiting
    while waiting:
        operation = waiting.pop()
        if operation in allowed and operation not in found:
            found.add(operation)
            waiting.extend(inputs_of(operation) if by_control else [tensor.op for tensor in operation.inputs])
    return found


def run_all_after(operations: Sequence[tf.Operation], others: Sequence[tf.Operation]) -> None:
    """Makes those of `operations` that depend on none of them wait for `others`, and so all of them."""
    among = set(operations)
    for operation in operations if others else ():
        if not among.intersection(inputs_of(operation)):
            operation._add_control_inputs(list(others))


def has_a_turn(operation: tf.Operation) -> bool:
    """Whether TensorFlow orders `operation` after those made before it: it writes a variable, or is a collective on a chain."""
    return operation.type not in READS and any(tensor.dtype == tf.resource for tensor in operation.inputs)


def has_an_effect(operation: tf.Operation) -> bool:
    """Whether `operation` runs for what it does, not for what it returns: it writes, or sends."""
    return has_a_turn(operation) or operation.type.startswith("Collective")


def reads_more_than_it_makes(operation: tf.Operation) -> bool:
    """Whether `operation` reads more floats than it returns; of sizes that are not known, the least."""
    return _floats_in(operation.inputs) > _floats_in(operation.outputs)


def _floats_in(tensors: Sequence[tf.Tensor]) -> int:
    shapes = [tensor.shape for tensor in tensors if tensor.dtype.is_floating and tensor.shape.rank is not None]
    return sum(math.prod(size or 1 for size in shape) for shape in shapes)


def can_be_called_again(function: tf.Graph, given_to_each: Collection[str] = ()) -> bool:
    """Whether calls of a traced function do each what its operations would, traced each time where the call stands.

    It then reads variables, and writes none but integers (states of random numbers); nothing else in it has a side effect, and
    what it takes from outside is the same everywhere: what a layer keeps as an eager tensor, such as a table of angles, too.
    What is named in `given_to_each` each call is given.
    """
    return all(map(_does_the_same_again, function.get_operations())) and all(
        not tf.is_symbolic_tensor(outside)
        or outside.dtype == tf.resource
        or outside.op.type in ("Placeholder", "Const")
        or outside.name in given_to_each
        for outside, _ in function.captures
    )


def _does_the_same_again(operation: tf.Operation) -> bool:
    if writes(operation):
        return operation.get_attr("dtype").is_integer
    if _calls_functions(operation):  # loops and branches, too: one would have to look through what they call
        return False
    return operation.type in READS or not auto_control_deps.op_is_stateful(operation)


def _calls_functions(operation: tf.Operation) -> bool:
    if operation.type not in _CALLS_FUNCTIONS:
        kinds = {attribute.type for attribute in operation.op_def.attr}
        _CALLS_FUNCTIONS[operation.type] = bool(kinds & {"func", "list(func)"})
    return _CALLS_FUNCTIONS[operation.type]


def writes(operation: tf.Operation) -> bool:
    """Whether `operation` writes a variable."""
    return operation.type in WRITES


def is_source(operation: tf.Operation) -> bool:
    """Whether `operation` is a constant, or the value of a floating variable: integers may have moved on when read again."""
    return operation.type == "Const" or operation.type == "ReadVariableOp" and operation.get_attr("dtype").is_floating


def inputs_of(operation: tf.Operation) -> list[tf.Operation]:
    """Returns the operations that `operation` waits for, as far as edges say so."""
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
