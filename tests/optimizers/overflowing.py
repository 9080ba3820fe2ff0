"""A model whose gradient is infinite in one feature, trained with loss scaling: on all ranks, or on those of one device."""

import keras
import numpy as np
import tensorflow as tf
from training import one_device, strategy_for

from tests.parity.comparison import assert_same_tree
from tests.programs.comparing import run


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


def assert_all_skip_the_step(program, zero_stage, **sizes):
    expected = run(program, one_device())
    assert expected["moved"] == [0.0] * 4 and expected["scale"] == 64.0 / 2**3  # it did overflow, in each of three steps
    assert_same_tree(run(program, strategy_for(2, zero_stage, **sizes)), expected)
