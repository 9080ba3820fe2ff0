"""Python functions of arrays as operations without state, at half the cost of `tf.numpy_function`.

That runs a function in an AutoGraph context of its own, and asks for NumPy's version with every array which it returns: a call
takes 54 to 62 microseconds, here 28 to 33, and a pipeline of many microbatches has hundreds in a step (docs/performance.md).
What TensorFlow calls for eager functions has neither.

The names are private to TensorFlow: tests/test_private_names.py fails when they change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import script_ops

_alive: list[_Call] = []  # TensorFlow's registry does not keep them, and its own functions stay for ever, too


class _Call(script_ops.EagerFunc):
    """Called with arrays, and returns them, as they are."""

    def __init__(self, function: Callable[..., Sequence[np.ndarray]]):
        self._function = function

    def __call__(self, device: Any, token: Any, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(self._function(*arguments))


def call_python(
    function: Callable[..., Sequence[np.ndarray]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """Emits an operation that calls `function` with the values of `inputs`; returns what it returns.

    It is not ordered among others, is not computed where nobody reads it, and is folded where all inputs are constants.

    Args:
        function: takes an array for each input, which it must not change, and returns arrays, in C order and aligned to 64 bytes
            if they are not to be copied.
        inputs: tensors.
        dtypes: those of the results.
    """
    if tf.executing_eagerly():
        return list(tf.numpy_function(function, list(inputs), list(dtypes), stateful=False))
    call = _Call(function)
    _alive.append(call)
    token = script_ops._py_funcs.insert(call)  # noqa: SLF001
    return list(tf.raw_ops.PyFuncStateless(input=list(inputs), token=token, Tout=list(dtypes)))
