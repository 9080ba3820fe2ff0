"""`sharding_group_size` with compression: what groups send each other is encoded, of exact shards, and nothing else is."""

import keras
import numpy as np
import numpy_compressors
import pytest
from compressed_training import adam, assert_each_step_is, batches, plan_of, sgd, sharded
from grids import exhaustive
from training import strategy_for

from tests.strategy.test_hybrid_sharding import assert_bytes, hybrid
from tfdist.extensions.compression import NAMES

pytestmark = pytest.mark.as_traced


@pytest.mark.parametrize(
    ("zero_stage", "compression"),
    [(2, "int8"), *(exhaustive(stage, name) for stage in range(4) for name in ("int8", "top_k", "bfloat16"))],
)
def test_bytes(zero_stage, compression):
    """Of what is compressed, hosts send each other the words of a row instead of its numbers."""
    assert_bytes(zero_stage, compression, NAMES[compression].bytes_of)


@pytest.mark.parametrize(
    ("codec", "zero_stage", "optimizer"),
    [
        ("int8", 3, adam),
        *(exhaustive(codec, stage, adam) for codec in ("int8", "int4", "top_k") for stage in range(4)),
        *(exhaustive("int8", stage, lambda: sgd(global_clipnorm=0.5)) for stage in range(4)),
        exhaustive("int8", 1, lambda: keras.optimizers.Adafactor(1e-2)),
    ],
)
def test_what_groups_send_each_other_is_compressed(codec, zero_stage, optimizer):
    """Steps are those of one device with the sums of exact groups, whose shards alone are encoded, and so is their sum."""
    strategy = hybrid(zero_stage, gradient_compression=codec, use_kernels=False)
    trained = sharded(strategy, optimizer, batches())
    assert_each_step_is(trained, getattr(numpy_compressors, codec), 4, zero_stage, optimizer, batches(), group_size=2)


@pytest.mark.exhaustive
def test_stages_change_no_bit():
    found = [sharded(hybrid(stage, gradient_compression="int4"), adam, batches())[1][-1] for stage in range(4)]
    for other in found[1:]:
        for one, theirs in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, theirs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_compressed_parameters_stay_within_a_group(zero_stage):
    """They are encoded in shards of the group, and what groups send each other is what it is without."""
    settings = {"parameter_compression": "int8", "use_kernels": False}
    (losses, states), (expected, theirs) = (
        sharded(strategy, adam, batches())
        for strategy in (hybrid(zero_stage, **settings), strategy_for(2, zero_stage, **settings))
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for mine, other in zip(states[-1], theirs[-1], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-2 * max(np.abs(other).max(initial=0.0), 1e-2))
    plans = [plan_of(hybrid(zero_stage, parameter_compression=name))[1] for name in (None, "int8")]
    assert plans[0].sent_bytes(between_hosts=True) == plans[1].sent_bytes(between_hosts=True)
    assert plans[0].sent_bytes() > plans[1].sent_bytes() and plans[1].parameters[0]
