"""Products with a kernel whose gradient, x^T dy, oneDNN would form at half its speed.

oneDNN multiplies matrices without packing them when one of their sides is short. The rows of x^T dy's operands then lie as far
apart in memory as their tensors are wide, and with a stride of 4,096 bytes, a usual width, they seem to push each other out of
the first cache. Transposed first, the wide operand is read along its rows: 13.8 ms become 8.9 for 1,024 positions, 256 inputs
and 1,024 outputs (docs/performance.md). TensorFlow's own kernels would not gain, and oneDNN's for AVX-512 were not measured.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.util import _pywrap_util_port

from tfdist.collectives import RankProgram
from tfdist.layers.input_gradients import input_gradient_scope
from tfdist.sharding import tape

# oneDNN's `nocopy_checker_avx2`: packed where 1 / m + 1 / n is below.
_UNPACKED = 0.0038
_STRIDE = 1024  # float32s, 4,096 bytes
_NARROW = 64  # below, the transpose costs what it gains
_BLOCK = 1024
_CPU_INFO = pathlib.Path("/proc/cpuinfo")


def product(x: tf.Tensor, kernel: tf.Tensor, program: RankProgram) -> tf.Tensor:
    """Returns `tf.matmul(x, kernel)`, its gradients to rounding those of TensorFlow.

    Args:
        x: (positions, inputs).
        kernel: (inputs, outputs), a static shape.
        program: of the rank that multiplies.
    """
    if not has_slow_gradient(x, kernel, program):
        return tf.matmul(x, kernel)
    inputs, outputs = kernel.shape
    input_scope = input_gradient_scope(program, x, [kernel])

    @tf.custom_gradient
    def multiply(x: tf.Tensor, kernel: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]]:
        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tape.backward_scope():
                upstream = tf.reshape(upstream, [-1, outputs])  # for its static shape
                if inputs > outputs:
                    of_kernel = _transposed_product(x, upstream)
                else:
                    of_kernel = _transposed(_transposed_product(upstream, x))
            with input_scope():  # stage 3 gathers the kernel again
                return tf.matmul(upstream, kernel, transpose_b=True), of_kernel

        return tf.matmul(x, kernel), gradient

    return multiply(x, kernel)


def has_slow_gradient(x: tf.Tensor, kernel: tf.Tensor, program: RankProgram) -> bool:
    """Whether these are (..., inputs) and (inputs, outputs) in float32, and the rank would be slow with the kernel's gradient."""
    if x.dtype != tf.float32 or kernel.dtype != tf.float32 or not kernel.shape.is_fully_defined():
        return False
    if kernel.shape.rank != 2 or (x.shape.rank or 0) < 2:
        return False
    return is_slow_shape(*kernel.shape) and program.is_on_cpu and _is_onednn_for_avx2()


def is_slow_shape(inputs: int, outputs: int) -> bool:
    """Whether oneDNN's AVX2 code forms the gradient of a kernel of this shape from unpacked rows of an unlucky stride."""
    narrow, wide = sorted((inputs, outputs))
    return narrow >= _NARROW and wide >= 2 * narrow and wide % _STRIDE == 0 and 1 / narrow + 1 / wide >= _UNPACKED


@functools.cache
def _is_onednn_for_avx2() -> bool:
    if not _pywrap_util_port.IsMklEnabled() or not _CPU_INFO.exists():
        return False
    flags = _CPU_INFO.read_text(encoding="utf-8").split()
    return "avx2" in flags and "avx512f" not in flags


def _transposed_product(wide: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Returns wide^T other. No more than a block of the wide operand's columns is held transposed."""
    blocks: list[tf.Tensor] = []
    for start in range(0, wide.shape[1], _BLOCK):
        with tf.control_dependencies(blocks[-1:]):
            block = wide[:, start : start + _BLOCK] if wide.shape[1] > _BLOCK else wide
        blocks.append(tf.matmul(_transposed(block), other))
    return tf.concat(blocks, 0) if len(blocks) > 1 else blocks[0]


def _transposed(matrix: tf.Tensor) -> tf.Tensor:
    """Returns the transpose, in a form that Grappler does not fold back into the product."""
    columns = matrix.shape[1]
    return tf.reshape(tf.transpose(tf.reshape(matrix, [-1, 1, columns]), [2, 1, 0]), [columns, -1])
