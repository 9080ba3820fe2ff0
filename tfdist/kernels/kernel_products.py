"""Products with a kernel, x W and its gradient x^T dy, whose operands oneDNN would read down their columns, at half its speed.

oneDNN multiplies matrices without packing them when one side of the result is short. An operand whose rows are the sum's index
is then read in steps as long as its rows, and with steps of 2,048 bytes, or a multiple, as usual widths make them, what is
read seems to push each other out of the first cache. Transposed first, such an operand is read along its rows: 13.8 ms become 8.9
for the gradient of 1,024 positions, 256 inputs and 1,024 outputs (docs/notes/performance.md). TensorFlow's own kernels would
not gain, and oneDNN's for AVX-512 were not measured.
"""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.util import _pywrap_util_port

from tfdist.collectives import RankProgram
from tfdist.kernels.input_gradients import input_gradient_scope
from tfdist.sharding import tape

# oneDNN's `nocopy_checker_avx2`: packed where 1 / m + 1 / n is below.
_UNPACKED = 0.0038
_STRIDE = 512  # float32s, 2,048 bytes
# With less of the other operand to multiply with, the transpose costs what it gains.
_NARROW = 128
_NARROW_OF_4096_BYTES = 64
_BLOCK = 1024
_CPU_INFO = pathlib.Path("/proc/cpuinfo")


def product(x: tf.Tensor, kernel: tf.Tensor, program: RankProgram) -> tf.Tensor:
    """Returns `tf.matmul(x, kernel)`; it and its gradients to rounding those of TensorFlow.

    Args:
        x: (positions, inputs).
        kernel: (inputs, outputs), a static shape.
        program: of the rank that multiplies.
    """
    if not is_slow(x, kernel, program):
        return tf.matmul(x, kernel)
    inputs, outputs = kernel.shape
    input_scope = input_gradient_scope(program, x, [kernel])

    @tf.custom_gradient
    def multiply(x: tf.Tensor, kernel: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]]:
        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tape.backward_scope():
                upstream = tf.reshape(upstream, [-1, outputs])  # for its static shape
            with input_scope():  # stage 3 gathers the kernel again, and drops it before it makes the kernel's gradient
                of_x = tf.matmul(upstream, kernel, transpose_b=True)
            with tape.backward_scope():
                return of_x, _gradient(x, upstream)

        if is_slow_result(x.shape[0], inputs, outputs):
            return tf.matmul(x, _transposed(kernel), transpose_b=True), gradient
        return tf.matmul(x, kernel), gradient

    return multiply(x, kernel)


def is_slow(x: tf.Tensor, kernel: tf.Tensor, program: RankProgram) -> bool:
    """Whether these are (..., inputs) and (inputs, outputs) in float32, and the rank would be slow with their product or with the
    kernel's gradient.
    """
    if x.dtype != tf.float32 or kernel.dtype != tf.float32 or not kernel.shape.is_fully_defined():
        return False
    if kernel.shape.rank != 2 or (x.shape.rank or 0) < 2:
        return False
    leading = x.shape[:-1]
    positions = math.prod(leading) if leading.is_fully_defined() else None
    is_slow_shape = is_slow_gradient(*kernel.shape) or is_slow_result(positions, *kernel.shape)
    return is_slow_shape and program.is_on_cpu and _is_onednn_for_avx2()


def is_slow_gradient(inputs: int, outputs: int) -> bool:
    """Whether oneDNN's AVX2 code forms the gradient of a kernel of this shape from unpacked rows of an unlucky stride."""
    narrow, wide = sorted((inputs, outputs))
    least = _NARROW if wide % 1024 else _NARROW_OF_4096_BYTES
    return narrow >= least and wide % _STRIDE == 0 and _is_unpacked(inputs, outputs)


def is_slow_result(positions: int | None, inputs: int, outputs: int) -> bool:
    """Whether oneDNN's AVX2 code multiplies (positions, inputs) with unpacked rows of a kernel of an unlucky stride; not if the
    number of positions, None, is not known.
    """
    if positions is None or positions < _NARROW or inputs < _NARROW_OF_4096_BYTES:
        return False
    return outputs % _STRIDE == 0 and _is_unpacked(positions, outputs)


def _is_unpacked(rows: int, columns: int) -> bool:
    return 1 / rows + 1 / columns >= _UNPACKED


@functools.cache
def _is_onednn_for_avx2() -> bool:
    if not _pywrap_util_port.IsMklEnabled() or not _CPU_INFO.exists():
        return False
    flags = _CPU_INFO.read_text(encoding="utf-8").split()
    return "avx2" in flags and "avx512f" not in flags


def _gradient(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    """Returns x^T upstream; both of static width."""
    inputs, outputs = x.shape[1], upstream.shape[1]
    if not is_slow_gradient(inputs, outputs):
        return tf.matmul(x, upstream, transpose_a=True)
    if inputs == outputs:  # both strides are unlucky
        return tf.matmul(_transposed(x), _transposed(upstream), transpose_b=True)
    if inputs > outputs:
        return _transposed_product(x, upstream)
    return _transposed(_transposed_product(upstream, x))


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
