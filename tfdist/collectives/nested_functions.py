"""Functions with a `tf.function` of their own that the function of a rank calls: they become part of it.

    @tf.function
    def gradients(x): ...                     a function of its own in one device's step

    def on_rank(x):
        grads = gradients(x)                  in a rank's: traced, or run, where it is called, as without `@tf.function`

The messages and reads of a rank have their places in one program, in which weights are gathered, gradients summed and optimizers
step; in a graph of its own nothing can be sent. `strategy.run` does the same with a `tf.function` that it is given. Functions
that are compiled (`jit_compile=True`), TensorFlow's own and tfdist's stay what they are.

The names are private to TensorFlow: tests/test_private_names.py fails when they change.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.ops import control_flow_util

from tfdist import errors
from tfdist.collectives.where import rank_program

_LIBRARIES = ("tensorflow", "tfdist")


def call(function: Any, arguments: Any, keywords: Any, original: Callable[[], Any]) -> Any:
    """Returns what `function`, of `tf.function`, returns when it is called here; `original()` calls it."""
    module = getattr(function.python_function, "__module__", None) or ""
    if rank_program() is None or is_compiled(function) or module.partition(".")[0] in _LIBRARIES:
        return original()
    inner, options = function.python_function, function._experimental_autograph_options
    if function._autograph:
        inner = autograph_util.py_func_from_autograph(inner, options)
    status = ag_ctx.Status.ENABLED if function._autograph else ag_ctx.Status.DISABLED
    with ag_ctx.ControlStatusCtx(status, options):  # the function's own, whatever that of its caller is
        return tf.nest.map_structure(_as_tensor, inner(*arguments, **keywords))


def refusal(variable: Any) -> NotImplementedError:
    """Returns the error of a gradient that is taken where a rank can send nothing: in a function that stays one of its own."""
    return errors.not_implemented(
        f"The gradient of the parameter {variable.name!r} is taken inside a nested `tf.function` that is compiled "
        "(`jit_compile=True`), or belongs to a library, within the function given to `strategy.run`. There it is a device's "
        "own, and cannot be summed.",
        fix="Leave out `jit_compile=True` there, or take the gradient outside of that function.",
    )


def is_compiled(function: Any) -> bool:
    """Whether XLA compiles `function`, of `tf.function`."""
    return bool(function._jit_compile)


def check_not_compiled(what: str, *, is_compiled: bool = False) -> None:
    """Raises NotImplementedError where `what` is done in a function that XLA compiles, or where that is said.

    It compiles for one device, and what several devices store or compute is in no such program.
    """
    if is_compiled or control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise errors.not_implemented(
            f"{what} in a function that XLA compiles (`jit_compile=True`) for one device.",
            fix="Leave out `jit_compile=True`, there and in `compile`. Inside the function given to `strategy.run` what does not "
            "send or take gradients may be compiled.",
        )


def _as_tensor(returned: Any) -> Any:
    """Returns a number as the tensor that a `tf.function` would return."""
    return tf.convert_to_tensor(returned) if isinstance(returned, bool | int | float | np.ndarray | np.generic) else returned
