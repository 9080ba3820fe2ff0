"""Operations that may stand between two sharded layers: those that treat every element of the sharded axis by itself.

If `f` is elementwise then `[f(Y_1), …, f(Y_t)] = f([Y_1, …, Y_t])`: each rank applies it to its own part.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

# The classes of `keras.ops` and `keras.activations`, by name: they are not public themselves.
OPERATIONS = frozenset(
    """
    Absolute Add Cast Celu Clip ConvertToTensor
    Cos Cosh Divide DivideNoNan Elu Erf Erfc Exp Exp2 Expm1 Gelu HardShrink HardSigmoid HardSilu
    HardTanh LeakyRelu Log Log1p LogSigmoid Logaddexp Maximum Minimum Multiply Negative Power ReLU Reciprocal Relu Relu6
    Rsqrt Selu Sigmoid Sign Silu Sin Sinh SoftShrink Softplus Softsign SparsePlus SparseSigmoid Sqrt Square Squareplus
    StopGradient Subtract Tan Tanh TanhShrink Threshold TrueDivide
    """.split()
)
_MODULES = ("keras.src.ops.", "keras.src.activations.")

# Layers whose output at a position depends on their inputs at that position, and on numbers, only.
LAYERS = (
    keras.layers.Add,
    keras.layers.Average,
    keras.layers.ELU,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.Identity,
    keras.layers.LeakyReLU,
    keras.layers.Maximum,
    keras.layers.Minimum,
    keras.layers.Multiply,
    keras.layers.ReLU,
    keras.layers.Subtract,
)


def is_elementwise(operation: keras.Operation) -> bool:
    """Returns whether an operation or a layer treats every element by itself, apart from what it is given beside tensors."""
    kind = type(operation)
    if isinstance(operation, keras.Layer):
        if operation.weights or operation.activity_regularizer is not None:
            return False
        if kind is keras.layers.Dropout:
            return operation.noise_shape is None
        if kind is keras.layers.Activation:
            return is_elementwise_activation(operation.activation)
        return kind in LAYERS
    named = kind.__name__ in OPERATIONS and kind.__module__.startswith(_MODULES)
    return named and all(is_number(value) for name, value in vars(operation).items() if name[0] != "_")


def is_number(value: Any) -> bool:
    """Returns whether an argument beside the tensors is the same number for every element, or no array at all."""
    return not isinstance(value, keras.Variable) and np.ndim(value) == 0


def is_elementwise_activation(activation: Callable[..., Any] | None) -> bool:
    """Returns whether an activation treats every element by itself, as `gelu` does and `softmax` does not.

    An activation may be any function, so it is tried: on a small matrix, and on two parts of its last axis alone.
    """
    if activation is None:
        return True
    if isinstance(activation, keras.Operation):  # to try it might build it
        return is_elementwise(activation)
    x = np.random.default_rng(0).normal(scale=2.0, size=(3, 8)).astype("float32")
    try:
        whole = keras.ops.convert_to_numpy(activation(x))
        parts = np.concatenate([keras.ops.convert_to_numpy(activation(part)) for part in (x[:, :5], x[:, 5:])], axis=1)
    except Exception:  # it wants another input: not what is looked for
        return False
    return whole.shape == parts.shape == x.shape and np.allclose(parts, whole, rtol=1e-4, atol=1e-6)
