"""The time of a step's operations together, from the times of a Transformer's block.

Operations do not take in a step what each takes over and over: what they read has left the caches since, what they write is
elsewhere each time, and the executor hands them to other threads.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.tools.doctor.check import Finding
from tfdist.tools.doctor.session import Session
from tfdist.tools.doctor.timing import seconds_of_one
from tfdist.tools.planning.hardware import Hardware
from tfdist.tools.planning.traced_model import trace
from tfdist.tools.planning.work import work_of

_TOKENS, _WIDTH = 64, 128
# So few that what operations take beside what is computed tells, and last so many that caches do not hold a step's tensors.
EXAMPLES = (1, 2, 8, 32)


def block_seconds(session: Session) -> Finding:
    """Returns what an operation of the block costs, forward and backward, and how long its largest number of `EXAMPLES` takes."""
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
    work = work_of(trace(_block).traces)
    totals = [work.totals(n) for n in EXAMPLES]

    def seconds_of(places: Sequence[int]) -> list[float]:
        return [seconds_of_one(session.base, functools.partial(passes, traced[place], EXAMPLES[place])) for place in places]

    few, most = range(len(EXAMPLES) - 1), len(EXAMPLES) - 1
    large = [totals[place]["large"] for place in few]
    each = _of_an_operation(seconds_of(few), large)
    if float(session.base.share("calibrate: an operation", repr(each))) <= 0:  # lost in what else the machine did
        each = _of_an_operation(seconds_of(few), large)
    each = max(each, 0.0)
    (seconds,) = seconds_of([most])
    cost = f"{each * 1e6:,.1f} µs" if each else "too little to be told from what else the machine does, counted as nothing"
    told = f"an operation: {cost}; {EXAMPLES[most]} examples: {1e3 * seconds:,.1f} ms"
    return Finding(told, {"operation": each, "seconds": seconds, "work": totals[most]})


def _of_an_operation(seconds: Sequence[float], large: Sequence[int]) -> float:
    """Returns c of n b + c k = seconds, by least squares of relative errors: of all but the last number of `EXAMPLES`.

    k operations are not small: a chain of small ones takes next to nothing, which one thread of TensorFlow's executor runs
    without handing on.
    """
    columns = np.array(list(zip(EXAMPLES, large, strict=False))) / np.array(seconds)[:, None]
    return float(np.linalg.lstsq(columns, np.ones(len(seconds)))[0][1])


def with_operations(hardware: Hardware, each: float, seconds: float, work: dict[str, Any]) -> Hardware:
    """Returns the hardware with what an operation of a step takes, and on CPUs at which rate it moves bytes.

        seconds = products and functions + bytes / rate + c k

    If the products and functions alone take longer, the rate is that of copies, and the hardware's source says so.

    Args:
        hardware: what else is known of it; its rate is that of copies.
        each: seconds of an operation, c.
        seconds: of the block with the largest number of examples.
        work: what is computed then (`Work.totals`).
    """
    found = dataclasses.replace(hardware, operation_seconds=each)
    if hardware.is_gpu:
        return found
    computing = sum(flops / hardware.flops_per_second("float32", flops) for flops in work["products"])
    left = seconds - computing - work["functions"] * hardware.function_seconds - work["large"] * each
    if left <= 0:
        return dataclasses.replace(
            found, source=f"{hardware.source}; bytes as of copies: a block took no longer than its products"
        )
    return dataclasses.replace(found, bytes_per_second=work["moved"] / left)


def _block() -> keras.Model:
    x = inputs = keras.Input((_TOKENS, _WIDTH))
    normalized = keras.layers.LayerNormalization()(x)
    x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(2, _WIDTH // 2)(normalized, normalized)])
    y = keras.layers.Dense(4 * _WIDTH, activation="gelu")(keras.layers.LayerNormalization()(x))
    model = keras.Model(inputs, keras.layers.Add()([x, keras.layers.Dense(_WIDTH)(y)]))
    model.compile("sgd", "mse")
    return model
