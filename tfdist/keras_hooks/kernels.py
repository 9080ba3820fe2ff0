"""Kernels: operations that are computed as `tfdist.kernels` does, faster on CPUs or with less memory, to rounding the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import rank_program
from tfdist.keras_hooks.table import replaces
from tfdist.kernels import crossentropy, feature_norms, matrix_products
from tfdist.kernels.gelu import gelu
from tfdist.kernels.kernel_products import is_slow

_BACKEND = "keras.src.backend.tensorflow"


@replaces(
    f"{_BACKEND}.nn",
    "gelu",
    signature="(x, approximate=True)",
    why="TensorFlow's keeps three tensors of the hidden layer's size for the backward pass; one is enough.",
)
def _gelu(original: Callable[..., Any], x: Any, approximate: bool = True) -> Any:
    x, program = keras.ops.convert_to_tensor(x), rank_program()
    if program is None or not (isinstance(x, tf.Tensor) and x.dtype.is_floating):
        return original(x, approximate)
    return gelu(x, approximate, program)


@replaces(
    "keras.src.ops.nn",
    "_layer_normalization",
    signature="(x, gamma=None, beta=None, axis=-1, epsilon=None, rms_scaling=False)",
    why="Keras's keeps two tensors of the input's size for the backward pass, and takes more operations.",
)
def _layer_normalization(
    original: Callable[..., Any],
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    axis: Any = -1,
    epsilon: float | None = None,
    rms_scaling: bool = False,
) -> Any:
    program = rank_program()
    if program is None or rms_scaling or not feature_norms.is_over_features(x, axis, gamma, beta):
        return original(x, gamma=gamma, beta=beta, axis=axis, epsilon=epsilon, rms_scaling=rms_scaling)
    return feature_norms.normalized(program, x, gamma, beta, epsilon, subtract_mean=True)


@replaces(
    "keras.src.ops.nn",
    "_rms_normalization",
    signature="(x, scale=None, axis=-1, epsilon=None)",
    why="Keras's keeps two tensors of the input's size for the backward pass, and takes more operations.",
)
def _rms_normalization(
    original: Callable[..., Any], x: Any, scale: Any = None, axis: Any = -1, epsilon: float | None = None
) -> Any:
    program = rank_program()
    if program is None or not feature_norms.is_over_features(x, axis, scale):
        return original(x, scale=scale, axis=axis, epsilon=epsilon)
    return feature_norms.normalized(program, x, scale, None, epsilon, subtract_mean=False)


@replaces(
    f"{_BACKEND}.nn",
    "_dot_product_attention_xla",
    signature="(query, key, value, bias, mask, is_causal, scale)",
    why="Keras's moves the heads before and behind each of six products; moved once, they are moved three times.",
)
def _dot_product_attention(
    original: Callable[..., Any], query: Any, key: Any, value: Any, bias: Any, mask: Any, is_causal: bool, scale: Any
) -> Any:
    attention = original if rank_program() is None else matrix_products.attention
    return attention(query, key, value, bias, mask, is_causal, scale)


@replaces(
    f"{_BACKEND}.numpy",
    "einsum",
    signature="(subscripts, *operands, **kwargs)",
    why="A projection of several axes is one product of matrices; Keras's multiplies example by example.",
)
def _einsum(original: Callable[..., Any], subscripts: str, *operands: Any, **kwargs: Any) -> Any:
    program = rank_program()
    if program is None or kwargs or len(operands) != 2:
        return original(subscripts, *operands, **kwargs)
    x, kernel = (keras.ops.convert_to_tensor(operand) for operand in operands)
    contracted = matrix_products.contracted_axes(subscripts)
    if not contracted or x.dtype != kernel.dtype or not x.dtype.is_floating or not kernel.shape.is_fully_defined():
        return original(subscripts, x, kernel)
    return matrix_products.projection(x, kernel, contracted, program)


@replaces(
    f"{_BACKEND}.numpy",
    "matmul",
    signature="(x1, x2)",
    why="oneDNN is slow with some widths, unless an operand is transposed first.",
)
def _matmul(original: Callable[..., Any], x1: Any, x2: Any) -> Any:
    program = rank_program()
    if program is None or any(isinstance(operand, (tf.SparseTensor, tf.RaggedTensor)) for operand in (x1, x2)):
        return original(x1, x2)
    x, kernel = tf.convert_to_tensor(x1), tf.convert_to_tensor(x2)
    return matrix_products.projection(x, kernel, 1, program) if is_slow(x, kernel, program) else original(x, kernel)


@replaces(
    f"{_BACKEND}.nn",
    "sparse_categorical_crossentropy",
    signature="(target, output, from_logits=False, axis=-1)",
    why="TensorFlow's kernel goes over the logits in a scalar loop on CPUs, and takes three times as long.",
)
def _sparse_categorical_crossentropy(
    original: Callable[..., Any], target: Any, output: Any, from_logits: bool = False, axis: int = -1
) -> Any:
    program = rank_program()
    # On a GPU TensorFlow's kernel is good, and another would not notice a label that is out of range.
    losses = None
    if program is not None and program.is_on_cpu and from_logits and crossentropy.are_logits(output, axis):
        losses = crossentropy.of_classes(target, output)
    return original(target, output, from_logits=from_logits, axis=axis) if losses is None else losses  # or raises
