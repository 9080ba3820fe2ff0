"""`tf.custom_gradient` without its leak: TensorFlow's keeps the graph of every traced call as long as the process lives.

TensorFlow registers the gradient function of every traced call under a new name, for ever, and that function holds tensors of the
graph. A step that is traced again (for a last batch of another size) would leave its whole graph behind. Here one function is
registered under one name, and finds the gradient of an operation on that operation's graph.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

_NAME = "TfdistCustomGradient"
_GRADIENTS_OF_GRAPH = "_tfdist_custom_gradients"


def custom_gradient(function: Callable[..., tuple[Any, Callable[..., Any]]]) -> Callable[..., Any]:
    """Decorates `function`, which returns its result and the function of its gradient, as `tf.custom_gradient` does.

    Args:
        function: takes tensors, reads no variables, and returns (result, gradient). The result is a tensor or several.
            `gradient(*upstream)` takes one upstream gradient per tensor of the result and returns one gradient per argument.
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if tf.executing_eagerly():
            return tf.custom_gradient(function)(*arguments)
        inputs = [tf.convert_to_tensor(x) for x in arguments]
        result, gradient = function(*inputs)
        results = tf.nest.flatten(result)

        def gradients(*upstream: Any) -> list[Any]:
            return tf.nest.flatten(gradient(*upstream))

        with record.stop_recording():
            outputs = _with_gradient(results, inputs, gradients)
        record.record_operation(function.__name__, outputs, inputs, gradients)
        return tf.nest.pack_sequence_as(result, outputs)

    return call


def with_adjoint(function: Callable[[tf.Tensor], tf.Tensor], adjoint: Callable[[tf.Tensor], Any], x: tf.Tensor) -> tf.Tensor:
    """Returns `function(x)`, a tensor, whose gradient with respect to `x` is `adjoint(upstream)`."""
    return custom_gradient(lambda x: (function(x), adjoint))(x)


def as_read(value: tf.Tensor, handle: tf.Tensor) -> tf.Tensor:
    """Returns `value` as what is read from the variable of `handle`: the gradient with respect to it is that of the variable.

    Gradient tapes that watch the handle see a read, and so do the gradients of functions, loops and branches that contain it.
    """
    if tf.executing_eagerly():
        with record.stop_recording():
            read = tf.identity(value)
    else:
        handle = tf.convert_to_tensor(handle)  # captured, to tapes and accumulators that watch the handle, too
        with record.stop_recording():
            # Dense, as the gradient of a function is anyway: a loop's would be put together by the handle's value.
            (read,) = _with_gradient([value], [handle], lambda upstream: [tf.convert_to_tensor(upstream)])
    record.record_operation("Read", [read], [handle], lambda upstream: [upstream], lambda tangent: [tangent])
    return read


def _with_gradient(results: list[tf.Tensor], inputs: list[tf.Tensor], gradients: Callable[..., list[Any]]) -> list[tf.Tensor]:
    """Returns `results` as outputs of an operation that has `gradients` also where no tape looks: in branches and functions."""
    _register()
    graph = tf.compat.v1.get_default_graph()
    with graph.gradient_override_map({"IdentityN": _NAME}):
        outputs = tf.identity_n([*results, *inputs])
    if not hasattr(graph, _GRADIENTS_OF_GRAPH):
        setattr(graph, _GRADIENTS_OF_GRAPH, {})
    count = len(results)
    known = getattr(graph, _GRADIENTS_OF_GRAPH)
    known[outputs[0].op.name] = lambda *upstream: [*[None] * count, *gradients(*upstream[:count])]
    return outputs[:count]


@functools.cache
def _register() -> None:
    @tf.RegisterGradient(_NAME)
    def of_operation(operation: tf.Operation, *upstream: Any) -> list[Any]:
        return getattr(operation.graph, _GRADIENTS_OF_GRAPH)[operation.name](*upstream)
