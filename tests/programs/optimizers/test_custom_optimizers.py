"""A custom optimizer with slots beside recomputation, accumulation, averages, clipping and several steps per execution."""

import contextlib

import keras
import pytest
from grids import exhaustive
from keras import layers, ops
from training import one_device

from tests.programs.comparing import assert_as_on_one_device
from tests.programs.small_training import fitted, normal

pytestmark = pytest.mark.as_traced


class Sophia(keras.optimizers.Optimizer):
    """An optimizer of one's own: two slots, a step that is clipped element by element, slower in layers further below."""

    def __init__(self, rate=0.02, slow=(), **arguments):
        super().__init__(learning_rate=rate, name="sophia", **arguments)
        self.slow = slow

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.momenta, self.curvatures = self.add_optimizer_variables(variables, ["momentum", "curvature"])

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        momentum, curvature = self.momenta[index], self.curvatures[index]
        rate = ops.cast(learning_rate, variable.dtype) * (
            0.3 if any(name in self._trainable_variables[index].path for name in self.slow) else 1.0
        )
        gradient = ops.cast(gradient, variable.dtype)
        self.assign_add(momentum, ops.multiply(gradient - momentum, 0.1))
        self.assign_add(curvature, ops.multiply(ops.square(gradient) - curvature, 0.05))
        self.assign_sub(variable, rate * ops.clip(momentum / (curvature + 1e-2), -1.0, 1.0))


def with_everything(strategy):
    """Recomputation, accumulation, averages and clipping together, with several steps per execution."""

    class Block(layers.Layer):
        def __init__(self, name):
            super().__init__(name=name)
            self.norm, self.one, self.two = layers.LayerNormalization(), layers.Dense(8, "gelu"), layers.Dense(4)

        def build(self, shape):
            self.norm.build(shape)
            self.one.build(shape)
            self.two.build((*shape[:-1], 8))

        def call(self, x):
            return x + self.two(self.one(self.norm(x)))

    settings = {"gradient_accumulation_steps": 2, "use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3}
    with strategy.scope():
        # On one device Keras's own recomputation refuses a layer of layers in a graph.
        with keras.RematScope(mode="full") if strategy is not one_device() else contextlib.nullcontext():
            blocks = [Block("lower"), Block("upper")]
        model = keras.Sequential([keras.Input((4,)), *blocks, layers.Dense(2)])
        model.compile(Sophia(slow=("lower",), global_clipnorm=0.5, **settings), "mse", steps_per_execution=2)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    return fitted(model, normal(4), normal(2, seed=2), epochs=3, validation_split=0.2, callbacks=[swap])


@pytest.mark.parametrize(
    ("program", "zero_stage", "devices"),
    [exhaustive(with_everything, 0, 4), exhaustive(with_everything, 3, 2)],
)
def test_it_is_one_device(program, zero_stage, devices):
    assert_as_on_one_device(program, zero_stage, devices)
