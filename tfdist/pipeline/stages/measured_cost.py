"""How long one layer takes by itself, forward and backward, measured without the model's weights, which need not exist."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.pipeline.stages.stage import run_node

_RUNS = 5


def measured_seconds(node: Any, inputs: Sequence[tf.TensorSpec]) -> float:
    """Returns the seconds of a forward and backward pass of a node, the median of some runs, on the default device.

    The node runs on inputs and weights made for it: random numbers where they are floating, and zeros, which are indices of any
    table, where they are integers.

    Raises:
        RuntimeError: the node cannot be run by itself.
    """
    variables = list(getattr(node.operation, "variables", ()))

    @tf.function(autograph=False)
    def step(inputs: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]) -> tf.Tensor:
        values = dict(zip(map(id, node.input_tensors), inputs, strict=True))
        sources = [x for x in (*inputs, *weights) if x.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            with keras.StatelessScope(state_mapping=list(zip(variables, weights, strict=True))):
                outputs = run_node(node, values, training=True)
            total = _sum(outputs)
        return total + _sum(tape.gradient(total, sources))  # all are summed: TensorFlow leaves out what nobody wants

    try:
        given = [_random(x.shape, x.dtype) for x in inputs], [_random(v.shape, v.dtype) for v in variables]
        step(*given)
        return statistics.median(_seconds(step, given) for _ in range(_RUNS))
    except Exception as error:  # whatever a layer raises that is called by itself
        raise errors.runtime_error(
            f"{node.operation.name!r} cannot be run by itself, on random inputs, so that its time could be measured.",
            fix="Count FLOPs instead: `measured=False`.",
        ) from error


def _seconds(step: Any, given: Any) -> float:
    start = time.perf_counter()
    step(*given).numpy()  # waits for the device
    return time.perf_counter() - start


def _sum(tensors: Sequence[Any]) -> tf.Tensor:
    """Returns the sum over all elements of tensors; None counts as nothing, and a table's gradient as its rows."""
    dense = [getattr(x, "values", x) for x in tensors if x is not None]
    return tf.add_n([tf.zeros(()), *(tf.reduce_sum(tf.cast(x, tf.float32)) for x in dense)])


def _random(shape: Any, dtype: Any) -> tf.Tensor:
    dtype = tf.as_dtype(dtype)
    return tf.cast(tf.random.normal(shape, stddev=0.1), dtype) if dtype.is_floating else tf.zeros(shape, dtype)
