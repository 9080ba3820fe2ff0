"""Python functions of arrays as operations, whose results they write where TensorFlow will read them.

`tf.numpy_function` costs more time and more memory. It runs a function in an AutoGraph context of its own, and asks for NumPy's
version with every array which it returns: a call takes 54 to 62 microseconds, here 28 to 33, and a step with many messages has
hundreds. And what a function returns is NumPy's: TensorFlow cannot free it without Python's lock, so that it stays
until the next call of any function ends (docs/notes/performance.md). Here TensorFlow allocates what the function fills.

The names are private to TensorFlow: tests/test_private_names.py fails when they change.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import script_ops

from tfdist import errors
from tfdist.collectives.automatic_order import exempt_from_automatic_order
from tfdist.collectives.emission import Emission
from tfdist.collectives.parts import Part
from tfdist.runtime import give_back_free_memory

# TensorFlow's registry does not keep them, and its own functions stay for ever, too: what they hold must be small.
_alive: "list[_Call]" = []
_DONE = np.zeros([], np.int64)


class _Call(script_ops.EagerFunc):
    """Called with arrays, as they are; the last ones are to be filled."""

    def __init__(self, function: Callable[..., None], num_results: int, on_first_call: Callable[[], None]):
        self._function = function
        self._num_results = num_results
        self._on_first_call = on_first_call

    def __call__(self, device: Any, token: Any, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        self._on_first_call()
        for found in arguments[len(arguments) - self._num_results :]:
            if found.flags.owndata or not found.flags.writeable:
                raise errors.runtime_error(
                    "TensorFlow hands copies of tensors to Python, and tfdist has to write the tensors themselves.",
                    tensorflow=tf.__version__,
                    fix="Use TensorFlow 2.21, or gRPC: `communication_options` with `CommunicationImplementation.RING`.",
                )
        self._function(*arguments)
        return [_DONE]


class PythonCalls(Part):
    """Common state of the calls of one rank in one trace. A part of the rank's state.

    Attributes:
        on_first_call: what the first call does, the first sign that the graph is executable.
        received: the operation that has received the rank's last message, if any.
    """

    def __init__(self, _: Emission):
        self.on_first_call = functools.cache(give_back_free_memory)
        self.received: list[tf.Operation] = []


def call_python(
    program: Emission,
    function: Callable[..., None],
    inputs: Sequence[tf.Tensor],
    results: Sequence[tuple[Any, tf.DType]],
    counter: tf.Tensor,
) -> list[tf.Tensor]:
    """Emits an operation that calls `function` with the values of `inputs` and arrays to fill; returns what these hold then.

    It runs in every step in which its inputs are computed, also if nobody reads its results, in no order among others.

    Args:
        function: takes an array for each input, which it must not change (a NumPy scalar for a tensor of no dimension), and one
            for each result, aligned to 64 bytes; (1,) in the place of ().
        results: of each shape and dtype. The shape is static or, if unknown, an int32 tensor.
        counter: handle of an int64 variable, to which the call adds zero when it has run: TensorFlow drops a call for which
            others only wait.
    """
    call = _Call(function, len(results), program.part(PythonCalls).on_first_call)
    _alive.append(call)
    token = script_ops._py_funcs.insert(call)  # noqa: SLF001
    with tf.control_dependencies(inputs):  # not earlier
        buffers = [_uninitialized(program, shape, dtype) for shape, dtype in results]
    (done,) = tf.raw_ops.PyFuncStateless(input=[*inputs, *buffers], token=token, Tout=[tf.int64])
    tf.raw_ops.AssignAddVariableOp(resource=counter, value=done)
    # No identity, nor a reshape: of these the graph optimizer puts a cast that follows before them, where it waits for nothing.
    with tf.control_dependencies([done]):
        filled = [tf.raw_ops.EnsureShape(input=buffer, shape=buffer.shape) for buffer in buffers]
    return [tf.reshape(x, []) if _is_scalar(shape) else x for x, (shape, _) in zip(filled, results, strict=True)]


def _uninitialized(program: Emission, shape: Any, dtype: tf.DType) -> tf.Tensor:
    if not tf.is_tensor(shape):
        shape = program.constant([1] if _is_scalar(shape) else [int(size) for size in shape])
    buffer = tf.raw_ops.Empty(shape=shape, dtype=dtype)
    exempt_from_automatic_order([buffer.op])
    return buffer


def _is_scalar(shape: Any) -> bool:
    return not tf.is_tensor(shape) and len(shape) == 0
