"""Steps with compressed gradients are, from the state before each, those of one device with the decoded sums."""

import functools

import keras
import numpy as np
import numpy_compressors as model_of
import pytest
from compressed_training import adam, assert_each_step_is, batches, sgd, sharded
from grids import exhaustive
from training import strategy_for

from tfdist.extensions.compression import Int4, Int8, TopK

pytestmark = pytest.mark.as_traced

CODECS = {
    "bfloat16": ("bfloat16", model_of.as_bfloat16),
    "int8": ("int8", model_of.int8),
    "int8-64": (Int8(64), functools.partial(model_of.int8, block_size=64)),
    "int4": ("int4", model_of.int4),
    "int4-128": (Int4(128), functools.partial(model_of.int4, block_size=128)),
    "top_k": ("top_k", model_of.top_k),
    "top_k-int4": (TopK(0.05, "int4"), functools.partial(model_of.top_k, fraction=0.05, rest=model_of.int4)),
    "top_k-alone": (TopK(0.3, None), functools.partial(model_of.top_k, fraction=0.3, rest=None)),
}


def check(codec, stage, size, optimizer=adam, data=None, accumulates=0, eagerly=False, **settings):
    """Compares steps under a strategy with those of one device; returns the losses and the states."""
    setting, decoded = CODECS[codec]
    data = batches() if data is None else data
    strategy = strategy_for(size, stage, gradient_compression=setting, use_kernels=False, **settings)
    trained = sharded(strategy, optimizer, data, eagerly)
    assert_each_step_is(trained, decoded, size, stage, optimizer, data, accumulates)
    return trained


GRID = [
    ("int4", 0, 4),
    *(exhaustive(codec, stage, size) for codec in CODECS for stage in range(4) for size in (2, 4)),
]


@pytest.mark.parametrize(("codec", "stage", "size"), GRID)
def test_steps_are_those_of_the_decoded_sums(codec, stage, size):
    check(codec, stage, size)


@pytest.mark.parametrize("name", ["int8", exhaustive("bfloat16"), exhaustive("int8-64")])
@pytest.mark.parametrize("gradients", [exhaustive(None), "int8"])
def test_ranks_compute_with_decoded_parameters_and_update_exact_ones(name, gradients):
    (setting, parameters), (codec, decoded) = CODECS[name], CODECS[gradients] if gradients else (None, lambda x: x)
    for size, eagerly, optimizer in ((2, False, adam), *(((4, False, adam), (2, True, sgd)) if gradients is None else ())):
        strategy = strategy_for(size, 3, gradient_compression=codec, parameter_compression=setting, use_kernels=False)
        trained = sharded(strategy, optimizer, batches(), eagerly)
        assert_each_step_is(trained, decoded, size, 3, optimizer, batches(), parameters=parameters)
        with pytest.raises(AssertionError):
            assert_each_step_is(trained, decoded, size, 3, optimizer, batches())


@pytest.mark.exhaustive
def test_the_comparison_sees_what_is_exact():
    with pytest.raises(AssertionError):
        assert_each_step_is(sharded(strategy_for(2, 1), adam, batches()), model_of.int8, 2, 1, adam, batches())


@pytest.mark.parametrize(
    ("stage", "optimizer", "accumulates"),
    [
        exhaustive(0, lambda: sgd(gradient_accumulation_steps=2), 2),
        (1, lambda: sgd(gradient_accumulation_steps=2, global_clipnorm=0.5), 2),
        exhaustive(2, lambda: sgd(gradient_accumulation_steps=2), 0),
        exhaustive(3, lambda: sgd(gradient_accumulation_steps=2), 0),
        *(exhaustive(stage, lambda: adam(global_clipnorm=0.5), 0) for stage in range(4)),
        exhaustive(2, lambda: adam(clipnorm=0.2), 0),
        exhaustive(1, lambda: keras.optimizers.Adafactor(1e-2), 0),
        exhaustive(3, lambda: keras.optimizers.Muon(1e-2), 0),
        exhaustive(2, lambda: adam(use_ema=True, ema_overwrite_frequency=2), 0),
        exhaustive(2, lambda: adam(weight_decay=0.1, loss_scale_factor=64.0), 0),
    ],
)
def test_optimizers(stage, optimizer, accumulates):
    """Accumulated gradients are encoded once per update at stages 0 and 1, in every call at stages 2 and 3; norms are of sums."""
    check("int8", stage, 2, optimizer, accumulates=accumulates)


@pytest.mark.parametrize(("codec", "stage"), [("int8", 2), *(exhaustive(codec, stage) for codec in CODECS for stage in range(4))])
@pytest.mark.parametrize("policy", ["float32", exhaustive("mixed_float16")])
def test_an_overflow_of_one_rank_is_seen_by_all(codec, stage, policy):
    """An infinite number in a row of the second rank: all skip the step."""
    data = batches()
    data[1][0][7, 3] = np.inf
    keras.config.set_dtype_policy(policy)
    try:
        _, states = check(codec, stage, 2, lambda: keras.optimizers.LossScaleOptimizer(sgd()), data)
    finally:
        keras.config.set_dtype_policy("float32")
    weights = [np.concatenate([x.ravel() for x in state[:8]]) for state in states]
    assert np.isfinite(weights[-1]).all()
    np.testing.assert_array_equal(weights[2], weights[1])
    assert np.any(weights[3] != weights[2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", range(4))
def test_an_overflow_while_ranks_accumulate(stage):
    data = batches()
    data[0][0][7, 3] = np.inf

    def optimizer():
        return keras.optimizers.LossScaleOptimizer(sgd(gradient_accumulation_steps=2), initial_scale=2.0**8)

    _, states = sharded(strategy_for(2, stage, gradient_compression="int4"), optimizer, data)
    assert all(np.isfinite(x).all() for x in states[-1])
    assert any(np.any(x != y) for x, y in zip(states[0], states[-1], strict=True))


@pytest.mark.parametrize("stage", [exhaustive(stage) for stage in range(4)])
@pytest.mark.parametrize("codec", ["int8", "top_k"])
def test_uneven_batches_and_eager_steps(codec, stage):
    check(codec, stage, 4, data=batches(11))
    check(codec, stage, 2, sgd, eagerly=True)
