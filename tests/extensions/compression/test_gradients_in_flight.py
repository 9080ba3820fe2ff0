"""Which gradients wait until earlier ones have been reduced, or encoded, and how many exist in full."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import strategy_for

from tfdist.extensions.compression import Int8, TopK


def held_back(layers, shape, kind, zero_stage):
    """Returns, for each operation of `kind` in backward, whether it waits for the reduction of another gradient,
    or for what reads the parameter in backward."""
    graph = graph_of(strategy_for(2, zero_stage, bucket_bytes=1), layers, shape)
    made = [one for one in graph.get_operations() if one.type == kind and "gradient_tape" in one.name]
    return [any("sgd" in before.name or "gradient_tape" in before.name for before in one.control_inputs) for one in made]


def graph_of(strategy, layers, shape):
    """Returns the graph of a training step."""
    with strategy.scope():
        model = keras.Sequential([keras.Input(shape), *layers()])
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
    batch = np.ones((4, *shape), "float32"), np.ones((4, *model.output_shape[1:]), "float32")
    step = tf.function(lambda x, y: strategy.run(lambda *rows: model.train_step(rows), args=(x, y)))
    return step.get_concrete_function(*map(tf.constant, batch)).graph


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_large_gradients_wait(zero_stage):
    waits = held_back(lambda: [keras.layers.Dense(64) for _ in range(5)], (64,), "MatMul", zero_stage)
    assert sum(waits) >= 2 * 3, waits  # of five on each of two ranks, but for the first two


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_gradients_smaller_than_what_they_keep_do_not(zero_stage):
    waits = held_back(
        lambda: [keras.layers.Conv2D(4, 3, padding="same") for _ in range(5)], (12, 12, 4), "Conv2DBackpropFilter", zero_stage
    )
    assert len(waits) >= 5 and not any(waits), waits


WIDTH, DEPTH = 64, 7
COMPRESSORS = [Int8(), "int4", "bfloat16", "top_k", TopK(0.1, None), TopK(0.1, None, error_feedback=True)]
HYBRID = {"sharding_group_size": 2, "ranks_per_host": 2}


@pytest.mark.parametrize(
    ("zero_stage", "compressor", "settings"),
    [
        (2, COMPRESSORS[0], {}),
        (2, COMPRESSORS[-1], {}),
        *(exhaustive(2, name, {}) for name in COMPRESSORS[1:-1]),
        *(exhaustive(3, name, {}) for name in COMPRESSORS),
        *(exhaustive(stage, name, HYBRID) for stage in (2, 3) for name in (COMPRESSORS[0], COMPRESSORS[-1])),
    ],
    ids=str,
)
def test_compressed_gradients_wait_until_earlier_ones_are_encoded(zero_stage, compressor, settings):
    """When nothing reads those of two messages before any longer, so that two exist in full, and that of four before is there."""
    strategy = strategy_for(
        4 if settings else 2, zero_stage, bucket_bytes=1, group_bytes=1, gradient_compression=compressor, **settings
    )
    graph = graph_of(strategy, lambda: [keras.layers.Dense(WIDTH, "tanh", use_bias=False) for _ in range(DEPTH)], (WIDTH,))
    on_rank_0 = [one for one in graph.get_operations() if one.device.endswith("CPU:0")]
    made = [one for one in on_rank_0 if one.type == "MatMul" and one.outputs[0].shape == (WIDTH, WIDTH)]
    sent = [one for one in on_rank_0 if one.type == "CollectiveAllToAllV2" and one.inputs[0].dtype == tf.int32]
    assert len(made) == len(sent) == DEPTH
    is_kept = "error_feedback=True" in str(compressor)  # of what groups send each other twice
    for number in range(2, DEPTH):
        before = needed_by(made[number])
        reading = readers_of_large(made[number - 2].outputs[0])
        assert len(reading) > 1
        assert reading <= before, [one.name for one in reading - before]
        assert zero_stage == 3 or is_kept and settings or sent[number - 2] not in before
        assert number < 4 or sent[number - 4] in before


def needed_by(operation):
    """Returns the operations that run before `operation`."""
    found, waiting = set(), [operation]
    while waiting:
        here = waiting.pop()
        new = {*(tensor.op for tensor in here.inputs), *here.control_inputs} - found
        found |= new
        waiting += new
    return found


def readers_of_large(tensor):
    """Returns what reads `tensor`, and what is made of it, as long as it is more than six tenths of its size."""
    found, waiting = set(), [tensor]
    size = math.prod(tensor.shape) * tensor.dtype.size
    while waiting:
        for operation in waiting.pop().consumers():
            if operation not in found:
                found.add(operation)
                waiting += [one for one in operation.outputs if math.prod(one.shape) * one.dtype.size > 0.6 * size]
    return found
