"""Recomputation of blocks of tensor-parallel layers, whose messages go between tensor ranks forward and backward."""

import keras
import numpy as np
import pytest

import tfdist
from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device
from tests.programs.memory.test_recomputation import (
    WIDTH,
    Y,
    compiled,
)
from tests.programs.memory.test_recomputation_of_models import recomputed

pytestmark = pytest.mark.as_traced

TOKENS = np.random.default_rng(6).integers(0, 7, (len(Y), 6))
NEXT = np.random.default_rng(7).integers(0, 8, (len(Y), 6))


def parallel_blocks(strategy, **settings):
    """Messages between tensor ranks within the blocks, forward and backward."""
    with strategy.scope():
        blocks = [tfdist.layers.ParallelTransformerBlock(2, 10, name=f"block_{k}", **settings) for k in range(2)]
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                tfdist.layers.VocabParallelEmbedding(7, WIDTH, mask_zero=True),
                *blocks,
                tfdist.layers.ColumnParallelDense(8),
            ]
        )
        compiled(recomputed(strategy, model))
    history = model.fit(TOKENS, NEXT, batch_size=8, shuffle=False, verbose=0).history
    return history, state(model), model.evaluate(TOKENS, NEXT, batch_size=8, verbose=0)


def lean_blocks(strategy):
    return parallel_blocks(strategy, normalization="rms", gated=True, use_bias=False, num_key_value_heads=1)


def sequence_parallel_blocks(strategy):
    return parallel_blocks(strategy, sequence_parallel=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", [parallel_blocks, lean_blocks, sequence_parallel_blocks])
@pytest.mark.parametrize(("devices", "zero_stage"), [(2, 0), (4, 3), (4, 1)])
def test_tensor_ranks(float64, program, devices, zero_stage):
    assert_as_on_one_device(program, zero_stage, devices, tensor_parallel_size=2)
