"""Loss scaling when one rank alone overflows, in one feature alone: all ranks skip the step, as one device does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from training import one_device, strategy_for

import tfdist
from tests.parity.comparison import assert_same_tree
from tests.programs.comparing import run
from tfdist.collectives import current_program


@keras.saving.register_keras_serializable()
class Overflowing(keras.layers.Layer):
    """Passes its input on; in backward the gradient of the last feature is infinite."""

    def call(self, x):
        @tf.custom_gradient
        def passed(x):
            infinite = tf.one_hot(x.shape[-1] - 1, x.shape[-1], on_value=np.inf, off_value=1.0)
            return tf.identity(x), lambda upstream: infinite * (tf.abs(upstream) + 1e-3)

        return passed(x)


def trained(model, strategy):
    with strategy.scope():
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0), "mse")
    before = model.get_weights()
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(12, 5)).astype("float32"), rng.normal(size=(12, 2)).astype("float32")
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, shuffle=False)
    optimizer = model.optimizer
    moved = [float(np.abs(new - old).max()) for new, old in zip(model.get_weights(), before, strict=True)]
    return {"moved": moved, "scale": float(optimizer.dynamic_scale.numpy()), "steps": int(optimizer.iterations.numpy())}


def on_tensor_ranks(strategy):
    """The last of four columns is the second rank's, and no weight is below them: the first rank's gradients are finite."""
    first = keras.layers.Dense(4) if strategy is one_device() else None
    with strategy.scope():
        first = first or tfdist.layers.ColumnParallelDense(4, gather_output=True)
        model = keras.Sequential([keras.Input((5,)), first, Overflowing(), keras.layers.Dense(2)])
    return trained(model, strategy)


def on_stages(strategy):
    """The gradient is infinite below the last stage's layer: only the first stage's weights overflow."""
    with strategy.scope():
        layers = [keras.Input((5,)), keras.layers.Dense(4), Overflowing(), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        if isinstance(strategy, tfdist.ShardedStrategy):
            model = tfdist.PipelineModel(model, num_microbatches=2, stages=[2])
    return trained(model, strategy)


@pytest.mark.parametrize(
    "program, sizes", [(on_tensor_ranks, {"tensor_parallel_size": 2}), (on_stages, {"pipeline_parallel_size": 2})]
)
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_all_skip_the_step(program, sizes, zero_stage):
    expected = run(program, one_device())
    assert expected["moved"] == [0.0] * 4 and expected["scale"] == 64.0 / 2**3  # it did overflow, in each of three steps
    assert_same_tree(run(program, strategy_for(2, zero_stage, **sizes)), expected)


@pytest.mark.parametrize("zero_stage", range(4))
def test_without_variables_and_on_one_data_rank(zero_stage):
    strategy = strategy_for(2, zero_stage)
    with strategy.scope():
        weights = [keras.Variable(np.ones(3, "float32"), name="a"), keras.Variable(np.ones((2, 2), "float32"), name="b")]
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0)
        optimizer.build(weights)

    def step(worst):
        def on_rank():
            value = worst if current_program().rank == 1 else 2.0
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights[0] * [2.0, 2.0, value]) + tf.reduce_sum(weights[1].value) * 2.0
            optimizer.apply(tape.gradient(loss, [w.value for w in weights]))

        tf.function(lambda: strategy.run(on_rank))()

    step(np.inf)
    assert float(optimizer.dynamic_scale.numpy()) == 1.0
    np.testing.assert_array_equal(weights[0].numpy(), np.ones(3))
    step(2.0)  # two ranks, divided by the scale, 1
    np.testing.assert_array_equal(weights[0].numpy(), np.full(3, -3.0))
    np.testing.assert_array_equal(weights[1].numpy(), np.full((2, 2), -3.0))
