"""What the operations of a step take together, from the times of a Transformer's block.

Operations do not take in a step what each takes over and over: what they read has left the caches since, what they write is
elsewhere each time, and the executor hands them to other threads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.doctor.check import Finding
from tfdist.doctor.session import Session
from tfdist.doctor.timing import seconds_of_one
from tfdist.planning.hardware import Hardware
from tfdist.planning.traced_model import trace
from tfdist.planning.work import work_of

_TOKENS, _WIDTH = 64, 128
# So few that what operations take beside what is computed tells, and last so many that caches do not hold a step's tensors.
EXAMPLES = (1, 2, 8, 32)


def block_seconds(session: Session) -> Finding:
    """Returns how long forward and backward of the block take with each number of `EXAMPLES`."""
    block = _block()
    shapes = [weight.shape for weight in block.trainable_variables]

    def one(weights: list[tf.Tensor], x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_mean(tf.square(block.stateless_call(weights, [], x)[0]))
        ends = [tf.reshape(gradient, [-1])[0] for gradient in tape.gradient(loss, weights)]
        return x + 1e-6 * tf.add_n(ends)  # the next pass needs all of this one, which TensorFlow would leave out

    def passes(traced: Any, examples: int) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        weights = [tf.random.uniform(shape) for shape in shapes]
        return tf.random.uniform([examples, _TOKENS, _WIDTH]), lambda x: traced(*weights, x)

    given = [tf.TensorSpec(shape) for shape in shapes]
    traced = [tf.function(one).get_concrete_function(given, tf.TensorSpec([n, _TOKENS, _WIDTH])) for n in EXAMPLES]
    pairs = zip(traced, EXAMPLES, strict=True)
    seconds = [seconds_of_one(session.base, functools.partial(passes, *pair)) for pair in pairs]
    told = ", ".join(f"{1e3 * one:,.2f}" for one in seconds)
    work = work_of(trace(_block).traces)
    data = {"seconds": seconds, "work": [work.totals(n) for n in EXAMPLES]}
    return Finding(f"{', '.join(map(str, EXAMPLES))} examples take {told} ms", data)


def with_operations(hardware: Hardware, seconds: Sequence[float], work: Sequence[dict[str, Any]]) -> Hardware:
    """Returns the hardware with what an operation of a step takes, and on CPUs at which rate it moves bytes.

        seconds of n examples = n b + c k                                           of the small numbers of examples
        seconds of n examples = products and functions + bytes / rate + c k         of the largest, on CPUs

    with k operations that are not small; b and c by least squares of relative errors, c at least 0. A chain of small operations
    takes next to nothing, which one thread of TensorFlow's executor runs without handing on. The rate at which a CPU copies stays
    if the products and functions alone take longer.

    Args:
        hardware: what else is known of it; on CPUs its rate is that of copies.
        seconds: of the block, with each number of `EXAMPLES`.
        work: what is computed then (`Work.totals`).
    """
    numbers = np.array([(n, one["large"]) for n, one in zip(EXAMPLES, work, strict=True)])[:-1]
    each = max(float(np.linalg.lstsq(numbers / np.array(seconds[:-1])[:, None], np.ones(len(numbers)))[0][1]), 0.0)
    most, rate = work[-1], hardware.bytes_per_second
    if not hardware.is_gpu:
        computing = sum(flops / hardware.flops_per_second("float32", flops) for flops in most["products"])
        left = seconds[-1] - computing - most["functions"] * hardware.function_seconds - most["large"] * each
        rate = most["moved"] / left if left > 0 else rate
    return dataclasses.replace(hardware, operation_seconds=each, bytes_per_second=rate)


def _block() -> keras.Model:
    x = inputs = keras.Input((_TOKENS, _WIDTH))
    normalized = keras.layers.LayerNormalization()(x)
    x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(2, _WIDTH // 2)(normalized, normalized)])
    y = keras.layers.Dense(4 * _WIDTH, activation="gelu")(keras.layers.LayerNormalization()(x))
    model = keras.Model(inputs, keras.layers.Add()([x, keras.layers.Dense(_WIDTH)(y)]))
    model.compile("sgd", "mse")
    return model
