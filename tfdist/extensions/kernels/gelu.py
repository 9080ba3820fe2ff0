"""GELU that keeps its input for the backward pass, and nothing else.

TensorFlow's GELU is several operations, each of which keeps what its own derivative needs: three tensors of the hidden layer's
size, of the tanh approximation more, where one is enough. In a Transformer's block the hidden layer is the largest (what that is
of a step: docs/notes/kernels.md). Their parts of the derivative are computed early, too, of all layers at once, since these do
not wait for the gradient from above. Here

    gelu'(x) = Phi(x) + x phi(x)

is computed from x when that gradient is there, as TensorFlow does for `tf.nn.silu`.

Values are TensorFlow's own, bit by bit, but for the exact GELU in float32 on CPUs, where TensorFlow's erfc takes four times as
long as its erf: Phi(x) is (1 + erf(x / sqrt 2)) / 2, as in PyTorch, which differs from erfc's by rounding of 1.
"""

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist.custom_gradients import custom_gradient


def gelu(x: tf.Tensor, approximate: bool, *, on_cpu: bool) -> tf.Tensor:
    """Returns the GELU of `x`, floating-point numbers of any shape; `approximate`: the tanh approximation of it."""
    derivative = _derivative_of_approximation if approximate else _derivative
    has_slow_erfc = not approximate and x.dtype == tf.float32 and on_cpu

    @custom_gradient
    def activate(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([upstream]):
                return upstream * derivative(x)

        y = 0.5 * x * (1 + tf.math.erf(x * _ROOT_OF_HALF)) if has_slow_erfc else tf.nn.gelu(x, approximate)
        return y, gradient

    return activate(x)


# As TensorFlow has them, rounded to float32 whatever the dtype: the gradient is that of the values.
_ROOT_OF_HALF = float(np.float32(math.sqrt(1 / 2)))
_CUBIC = float(np.float32(0.044715))


def _derivative(x: tf.Tensor) -> tf.Tensor:
    """Of x erfc(-u) / 2, u = x / sqrt 2."""
    u = x * _ROOT_OF_HALF
    density = tf.exp(-0.5 * math.log(math.pi) - tf.square(u)) * u
    return 0.5 + 0.5 * tf.math.erf(u) + density  # faster than erfc, which is exact where both are next to 0


def _derivative_of_approximation(x: tf.Tensor) -> tf.Tensor:
    """Of x (1 + tanh u) / 2, u = c (x + a x^3)."""
    a, c = _CUBIC, math.sqrt(2 / math.pi)
    squares = tf.square(x)
    tanh = tf.tanh(c * x * (1 + a * squares))
    return 0.5 * (1 + tanh) + 0.5 * c * x * (1 - tf.square(tanh)) * (1 + 3 * a * squares)
