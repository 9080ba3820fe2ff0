"""Layer and RMS normalization over the last axis in fewer operations, and with fewer tensors kept for the backward pass.

Keras's are made of broadcasts, each of which has a gradient of its own: a layer normalization is 11 operations forward and 21
backward, and keeps two tensors of the input's size. Here it is 9 and 11, and keeps one. With the input's mean m (0 for RMS) and
r = 1 / sqrt(variance + epsilon)

    n = (x - m) r,    y = gamma n + beta
    dx = r (g - mean(g) - n mean(g n)),  g = gamma dy;    dgamma = sum(dy n);    dbeta = sum(dy)

keeps n and r (Ba et al. 2016, https://arxiv.org/abs/1607.06450; RMS, which has no mean(g): Zhang and Sennrich 2019,
https://arxiv.org/abs/1910.07467). Keras's values to rounding, in at least float32 as there. The sums over rows are BiasAddGrad,
which is faster than Sum on a CPU.

Other axes, and parameters of another shape than the axis, are left to Keras.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.custom_gradients import custom_gradient

Scope = Callable[[], contextlib.AbstractContextManager[None]]


def is_over_features(x: Any, axis: int | Sequence[int], *parameters: Any) -> bool:
    """Whether this is a normalization over the last axis, with parameters of that axis's shape."""
    if not (isinstance(x, tf.Tensor) and x.dtype.is_floating and (x.shape.rank or 0) > 1):
        return False
    axes, size = [axis] if isinstance(axis, int) else list(axis), x.shape[-1]
    is_last = len(axes) == 1 and axes[0] in (-1, x.shape.rank - 1)
    return is_last and bool(size) and all(value is None or tuple(value.shape) == (size,) for value in parameters)


def normalized(
    x: tf.Tensor,
    gamma: tf.Tensor | None,
    beta: tf.Tensor | None,
    epsilon: float | None,
    *,
    subtract_mean: bool,
    input_scope: Scope = contextlib.nullcontext,
    parameter_scope: Scope = contextlib.nullcontext,
) -> tf.Tensor:
    """Returns `x`, which `is_over_features`, normalized; scaled by `gamma` and moved by `beta` where they are not None.

    Args:
        epsilon: is added to the variance; None: Keras's default.
        subtract_mean: whether this is layer normalization, and not RMS normalization.
        input_scope, parameter_scope: make the contexts in which the gradients of `x` and of the parameters are formed.
    """
    epsilon = keras.config.epsilon() if epsilon is None else epsilon
    result, dtype = x.dtype, keras.backend.result_type(x.dtype.name, "float32")
    parameters = [tf.cast(value, dtype) for value in (gamma, beta) if value is not None]
    is_scaled, x = gamma is not None, tf.cast(x, dtype)

    @custom_gradient
    def normalize(x: tf.Tensor, *parameters: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        centered = x - _mean(x) if subtract_mean else x
        inverse = tf.math.rsqrt(_mean(tf.square(centered)) + epsilon)
        normalized = y = centered * inverse
        if is_scaled:
            y = y * parameters[0]
        if len(parameters) > is_scaled:
            y = y + parameters[-1]

        def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
            with input_scope():
                of_normalized = upstream * parameters[0] if is_scaled else upstream
                of_x = of_normalized - normalized * _mean(of_normalized * normalized)
                if subtract_mean:
                    of_x -= _mean(of_normalized)
                gradients = [of_x * inverse]
            with parameter_scope():
                if is_scaled:
                    gradients.append(tf.raw_ops.BiasAddGrad(out_backprop=upstream * normalized))
                if len(parameters) > is_scaled:
                    gradients.append(tf.raw_ops.BiasAddGrad(out_backprop=upstream))
                return gradients

        return y, gradient

    return tf.cast(normalize(x, *parameters), result)


def _mean(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(x, axis=-1, keepdims=True)
