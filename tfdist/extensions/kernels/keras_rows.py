"""Kernels: operations that are computed by functions of tfdist, faster on CPUs or with less memory, to rounding the same.

The setting `use_kernels` of the strategy switches all of them.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import RankProgram, rank_program
from tfdist.extensions.kernels import crossentropy, feature_norms, matrix_products
from tfdist.extensions.kernels.gelu import gelu
from tfdist.graphs import tape
from tfdist.keras_hooks.table import BACKEND_NN, BACKEND_NUMPY, replaces
from tfdist.placements.facts import axes_of_static_rows, have_met
from tfdist.sharding import config_of


def _program(x: Any = None) -> RankProgram | None:
    """Returns the program of the rank that computes; None where none does, or where its strategy's kernels are off, or where rows
    have met in `x`: what is made of it will be made again, of all, and a kernel's gradient function would not."""
    program, config = rank_program(), config_of(tf.distribute.get_strategy())
    if program is None or config is None or have_met(x):
        return None
    wanted = config.use_kernels
    is_on = program.is_on_cpu if wanted is None else wanted  # measured on CPUs alone: docs/notes/kernels.md
    return program if is_on else None


@replaces(BACKEND_NN, "gelu")
def _gelu(original: Callable[..., Any], x: Any, approximate: bool = True) -> Any:
    """TensorFlow's keeps three tensors of the hidden layer's size for the backward pass; one is enough."""
    program = _program(x)
    if program is None or not (isinstance(x := keras.ops.convert_to_tensor(x), tf.Tensor) and x.dtype.is_floating):
        return original(x, approximate)
    return gelu(x, approximate, on_cpu=program.is_on_cpu)


@replaces("keras.src.ops.nn", "_layer_normalization")
def _layer_normalization(
    original: Callable[..., Any],
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    axis: Any = -1,
    epsilon: float | None = None,
    rms_scaling: bool = False,
) -> Any:
    """Keras's keeps two tensors of the input's size for the backward pass, and takes more operations."""
    program = _program(x)
    if program is None or rms_scaling or not feature_norms.is_over_features(x, axis, gamma, beta):
        return original(x, gamma=gamma, beta=beta, axis=axis, epsilon=epsilon, rms_scaling=rms_scaling)
    return _normalized(program, x, gamma, beta, epsilon, subtract_mean=True)


@replaces("keras.src.ops.nn", "_rms_normalization")
def _rms_normalization(
    original: Callable[..., Any], x: Any, scale: Any = None, axis: Any = -1, epsilon: float | None = None
) -> Any:
    """Keras's keeps two tensors of the input's size for the backward pass, and takes more operations."""
    program = _program(x)
    if program is None or not feature_norms.is_over_features(x, axis, scale):
        return original(x, scale=scale, axis=axis, epsilon=epsilon)
    return _normalized(program, x, scale, None, epsilon, subtract_mean=False)


def _normalized(program: RankProgram, x: tf.Tensor, gamma: Any, beta: Any, epsilon: float | None, *, subtract_mean: bool) -> Any:
    """Normalizes; stage 3 gathers parameters again for gradients, but not for the input's where it is not wanted.

    It is not where a tape follows some of the parameters and not `x`, as in a model's first layer. In loops and nested functions
    tapes do not follow what is made there.
    """
    gamma, beta = (None if value is None else tf.convert_to_tensor(value) for value in (gamma, beta))
    parameters = [value for value in (gamma, beta) if value is not None]
    is_wanted = not program.exists_here(x) or tape.tapes_watching([x]) or not tape.tapes_watching(parameters)
    scopes = {"input_scope": tape.backward_scope if is_wanted else contextlib.nullcontext, "parameter_scope": tape.backward_scope}
    return feature_norms.normalized(x, gamma, beta, epsilon, subtract_mean=subtract_mean, **scopes)


@replaces(BACKEND_NN, "_dot_product_attention_xla")
def _dot_product_attention(
    original: Callable[..., Any], query: Any, key: Any, value: Any, bias: Any, mask: Any, is_causal: bool, scale: Any
) -> Any:
    """Keras's moves the heads before and after each of six products; moved once, they are moved three times."""
    attention = original if _program() is None else matrix_products.attention
    return attention(query, key, value, bias, mask, is_causal, scale)


@replaces(BACKEND_NUMPY, "einsum")
def _einsum(original: Callable[..., Any], subscripts: str, *operands: Any, **kwargs: Any) -> Any:
    """A projection of several axes is one product of matrices; Keras's multiplies example by example."""
    if _program() is None or kwargs or len(operands) != 2:
        return original(subscripts, *operands, **kwargs)
    x, kernel = (keras.ops.convert_to_tensor(operand) for operand in operands)
    contracted = matrix_products.contracted_axes(subscripts)
    if not contracted or x.dtype != kernel.dtype or not x.dtype.is_floating or not kernel.shape.is_fully_defined():
        return original(subscripts, x, kernel)
    return matrix_products.projection(x, kernel, contracted)


@replaces(BACKEND_NN, "sparse_categorical_crossentropy")
def _sparse_categorical_crossentropy(
    original: Callable[..., Any], target: Any, output: Any, from_logits: bool = False, axis: int = -1
) -> Any:
    """TensorFlow's kernel goes over the logits in a scalar loop on CPUs, and takes three times as long."""
    program, losses = _program(output), None
    # On a GPU TensorFlow's kernel is good, and another would not notice a label that is out of range.
    axes = axes_of_static_rows(output)
    are_rows = bool(axes) and axes[-1] == len(output.shape) - 1  # the classes, whose number is then no constant
    if program is not None and program.is_on_cpu and from_logits and not are_rows:
        losses = crossentropy.of_logits(target, output, axis)
    return original(target, output, from_logits=from_logits, axis=axis) if losses is None else losses
