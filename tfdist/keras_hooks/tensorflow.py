"""TensorFlow itself: AutoGraph leaves tfdist's code as it is, seeds are those of a rank, tapes see a sharded variable as one."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import config
from tensorflow.python.framework import tensor_conversion_registry

from tfdist.collectives import Where, exclusion, nested_functions, rank_program, trace_branches, where
from tfdist.graphs import calls, tape
from tfdist.graphs.frames import is_asked_by_keras
from tfdist.keras_hooks.table import is_users, replaces
from tfdist.keras_layers import randomness
from tfdist.placements.eager import KNOWN, EagerFacts
from tfdist.placements.facts import axes_of_static_rows
from tfdist.placements.kinds import Replicate
from tfdist.placements.replicas import ReplicaCount, ReplicaPart
from tfdist.placements.telling import as_whole, warn_of_number_read
from tfdist.runtime import coordination, out_of_memory
from tfdist.sharding import ShardedVariable
from tfdist.sharding.known_sums import KnownSums

# The public function takes no kinds of numbers, and TensorFlow's hook for a class is not told of the dtype of what it meets.
tensor_conversion_registry.register_tensor_conversion_function_internal(
    (ReplicaCount, ReplicaPart), lambda number, dtype, name, as_ref: number.as_tensor(dtype), priority=-1
)


@replaces("tensorflow.python.autograph.core.config", "CONVERSION_RULES")
def _conversion_rules(rules: tuple[Any, ...]) -> tuple[Any, ...]:
    """A `tf.function` rewrites the Python of what it calls, library code too unless the library is listed here, as TensorFlow and
    Keras are."""
    return config.DoNotConvert("tfdist"), *rules


@replaces("tensorflow.python.framework.random_seed", "get_seed")
def _get_seed(original: Callable[..., Any], op_seed: Any) -> Any:
    """TensorFlow counts a graph's random operations, the ranks' one after the other: workers would draw the same numbers as each
    other, tensor peers different ones."""
    return randomness.op_seeds(lambda: original(op_seed))


@replaces("tensorflow.python.eager.tape", "_variables_override", signature="(variable)")
def _watched_variables(original: Callable[..., Any], variable: Any) -> Any:
    """Outside replicas, in `scope()`, a gradient tape would watch the shards of a variable, and its gradient is whole."""
    if isinstance(variable, ShardedVariable) and where() is Where.CROSS_REPLICA:
        return [variable]
    return original(variable)


@replaces("tensorflow.python.ops.cond_v2", "cond_v2")
def _cond(original: Callable[..., Any], pred: Any, true_fn: Any, false_fn: Any, name: Any = "cond") -> Any:
    """In the function of a rank a branch may hold collectives: an optimizer's step, a gradient. All ranks must then take the same
    one, which TensorFlow does not look at, and what the branch sends has its place among what is sent around it."""
    return trace_branches(pred, [true_fn, false_fn], lambda selector, functions: original(selector, *functions, name=name))


@replaces("tensorflow.python.ops.cond_v2", "indexed_case")
def _indexed_case(
    original: Callable[..., Any],
    branch_index: Any,
    branch_fns: Any,
    name: Any = "indexed_case",
    lower_using_switch_merge: Any = None,
) -> Any:
    """As of `cond`, for `tf.switch_case`."""
    return trace_branches(
        branch_index, branch_fns, lambda selector, functions: original(selector, functions, name, lower_using_switch_merge)
    )


@replaces(
    "tensorflow.python.eager.polymorphic_function.polymorphic_function.Function", "__call__", signature="(self, *args, **kwds)"
)
def _call(original: Callable[..., Any], self: Any, *args: Any, **kwds: Any) -> Any:
    """A `tf.function` that a rank's function calls is a graph of its own, in which no gradient can be summed and no optimizer
    step: what reads a gradient there, or comes out of it, would be of a device's own. Where a step runs out of memory, the error
    says what has filled it."""
    try:
        return nested_functions.call(self, args, kwds, lambda: original(self, *args, **kwds))
    except tf.errors.ResourceExhaustedError as error:
        out_of_memory.explain(self, error)
        raise


@replaces("tensorflow.python.eager.polymorphic_function.concrete_function.ConcreteFunction", "_call_flat")
def _call_flat(original: Callable[..., Any], self: Any, tensor_inputs: Any, captured_inputs: Any) -> Any:
    """What a function writes is not to be kept from before its call, and threads that send something take turns: TensorFlow tells
    nobody of a call."""
    return calls.call(self, lambda: original(self, tensor_inputs, captured_inputs))


_PYTHON = "(func, inp, Tout, stateful=None, use_eager_py_func=False, is_grad_func=False, name=None)"


@replaces("tensorflow.python.ops.script_ops", "_internal_py_func", signature=_PYTHON)
def _python_function(original: Callable[..., Any], func: Any, *args: Any, **kwargs: Any) -> Any:
    """Python code of a step that runs another step would wait for ever: for its own to end, or for a thread to run in."""
    made, program = original(func, *args, **kwargs), rank_program()
    return made if program is None or program.is_eager else exclusion.note_python(made)


@replaces("tensorflow.name_scope", "__init__")
def _name_scope(original: Callable[..., None], self: Any, name: str) -> None:
    """What a tape has made is known by its name: a scope `gradients` of the user's, in a rank's function, is named otherwise."""
    original(self, name if rank_program() is None or not isinstance(name, str) else tape.users_scope(name))


_ROWS = "The number of a rank's rows is no constant, also where the trace knows it or the step runs eagerly: others have others."


@replaces("tensorflow.python.ops.array_ops", "shape_internal", why=_ROWS)
def _shape(original: Callable[..., Any], input: Any, name: Any = None, optimize: bool = True, out_type: Any = None) -> Any:
    return _asked_of_rows(original, input, name, optimize, out_type)


def _asked_of_rows(original: Callable[..., Any], input: Any, name: Any, optimize: bool, out_type: Any) -> Any:
    """Asks for the shape or the size of `input`, for no constant if that is rows. Int32 a GPU would send to its host."""
    if not axes_of_static_rows(input):
        return original(input, name, optimize, out_type)
    program = rank_program()
    is_sent = program is not None and not program.is_on_cpu and input.dtype == tf.int32
    return original(tf.cast(input, tf.int64) if is_sent else input, name, False, out_type)


@replaces("tensorflow.python.ops.array_ops", "array_like_impl", why=_ROWS)
def _array_like(
    original: Callable[..., Any],
    array_fn: Any,
    array_like_fn: Any,
    tensor: Any,
    dtype: Any,
    name: Any,
    optimize: bool = True,
    layout: Any = None,
) -> Any:
    return original(array_fn, array_like_fn, tensor, dtype, name, optimize and not axes_of_static_rows(tensor), layout)


@replaces("tensorflow.python.ops.array_ops", "size_internal", why=_ROWS)
def _size(original: Callable[..., Any], input: Any, name: Any = None, optimize: bool = True, out_type: Any = tf.int32) -> Any:
    if tf.executing_eagerly() and isinstance(input, tf.Tensor) and rank_program() is not None:
        return tf.raw_ops.Size(input=input, out_type=out_type)
    return _asked_of_rows(original, input, name, optimize, out_type)


@replaces("keras.src.backend.tensorflow.core", "shape")
def _keras_shape(original: Callable[..., Any], x: Any) -> Any:
    """The number of a rank's rows is no Python number for who asks Keras for it: others have others. Keras's own layers may know
    it, they do not let rows meet."""
    found, axes = original(x), axes_of_static_rows(x)
    if not axes or is_asked_by_keras():
        return found
    return tuple(tf.shape(x)[axis] if axis in axes else size for axis, size in enumerate(found))


_GIVEN = (
    """The gradient function finds what the function was given: numbers of a rank's own rows. So ranks agree on them first."""
)


@replaces("tensorflow.python.ops.custom_gradient", "_eager_mode_decorator", why=_GIVEN)
@replaces("tensorflow.python.ops.custom_gradient", "_graph_mode_decorator", why=_GIVEN)
def _custom_gradient(original: Callable[..., Any], f: Any, args: Any, kwargs: Any) -> Any:
    program = rank_program(peers_on="data")
    if program is None or not is_users(f):
        return original(f, args, kwargs)

    def of_all_rows(x: Any) -> Any:
        return as_whole(program, x, "custom_gradient") if tf.is_tensor(x) else x

    return original(f, *tf.nest.map_structure(of_all_rows, (args, kwargs)))


@replaces("tensorflow.python.framework.ops._EagerTensorBase", "_numpy")
def _numpy(original: Callable[..., Any], self: Any) -> Any:
    """What Python reads in an eager step is of the rank's own rows, and no operation: nobody sees what becomes of it."""
    if hasattr(self, KNOWN):
        warn_of_number_read(self)
    return original(self)


_SUMMED = """In an eager run TensorFlow stops all ranks for it, and looks at no value: gradients that are sums over the ranks
already (stage 3) would be summed again."""


@replaces("tensorflow.python.distribute.distribute_lib.ReplicaContext", "all_reduce", why=_SUMMED)
def _all_reduce(original: Callable[..., Any], self: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
    return _from_all(original(self, reduce_op, _summands(value), options))


@replaces("tensorflow.python.distribute.distribute_lib.ReplicaContext", "all_gather", why=_SUMMED)
def _all_gather(original: Callable[..., Any], self: Any, value: Any, axis: Any, options: Any = None) -> Any:
    return _from_all(original(self, _summands(value), axis, options))


@replaces("tensorflow.python.distribute.distribute_lib.ReplicaContext", "merge_call")
def _merge_call(original: Callable[..., Any], self: Any, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
    """What ranks bring to it is summed there: of a gradient each rank's own. The graph has operations of several ranks then,
    which none of them would know for a sum."""
    program = rank_program()
    if program is not None and program.is_eager:
        args, kwargs = program.part(KnownSums).own((args, kwargs))
    elif program is not None:
        args, kwargs = tf.nest.map_structure(lambda x: program.summand(x) if tf.is_symbolic_tensor(x) else x, (args, kwargs))
    return original(self, merge_fn, args, kwargs)


def _from_all(found: Any) -> Any:
    program = rank_program()
    if program is not None and program.is_eager:
        for x in filter(tf.is_tensor, tf.nest.flatten(found)):
            program.part(EagerFacts).declare(x, Replicate())
    return found


def _summands(value: Any) -> Any:
    program = rank_program()
    if program is None or not program.is_eager:
        return value  # a traced one is tfdist's own
    return tf.nest.map_structure(lambda x: program.summand(x) if tf.is_tensor(x) else x, value)


@replaces("tensorflow.python.pywrap_tfe", "TFE_EnableCollectiveOps")
def _enable_collective_ops(original: Callable[..., Any]) -> Callable[..., Any]:
    """While a worker's server waits for the others, no thread of Python runs: none that could say that a worker has died."""
    return functools.partial(coordination.enable_collective_ops, original)


_ZEROS = """The gradient of a loop starts from zeros of the shape that a variable is found to have when the loop runs. Nothing is
found at the handle by which tapes know a sharded variable as a whole: where the shape is known, that is taken."""


@replaces("tensorflow.python.ops.while_v2", "_zeros_like", why=_ZEROS)
def _zeros_like(original: Callable[..., Any], op_input: Any, op_output: Any) -> Any:
    zeros = tape.zeros_of_variable(op_input)
    return original(op_input, op_output) if zeros is None else zeros


@replaces("tensorflow.python.ops.control_flow_state", "_ZerosLikeV2", why=_ZEROS)
def _zeros_like_output(original: Callable[..., Any], op: Any, index: Any) -> Any:
    zeros = tape.zeros_of_variable(op.outputs[index])
    return original(op, index) if zeros is None else zeros
