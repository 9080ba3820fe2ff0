"""The gpt, its layers cut by `tfdist.parallelize`."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import tfdist
from benchmarks.cases import Case
from benchmarks.devices import take_devices
from benchmarks.gpt_arrays import EPSILON, LEARNING_RATE, initial_weight, token_batch
from benchmarks.training import build_model, place_on_all, run_steps

PLAN = {
    r"token_embedding$": "vocab",
    r"attention$": "column",
    r"mlp_in$": "column",
    r"mlp_out$": "row",
    r"logits$": "column",
}


class TensorLoop:
    """A `tf.function` around `strategy.run` on a mesh of one data index: all ranks have the whole batch, on their devices."""

    def __init__(self, case: Case):
        devices = take_devices(case.devices, case.logical_gpus)
        strategy = tfdist.ShardedStrategy(devices, zero_stage=0, tensor_parallel_size=case.devices)
        with strategy.scope():
            self.model = model = build_model(case)
            for variable in model.variables:
                variable.assign(initial_weight(variable.path, variable.shape))
            tfdist.parallelize(model, PLAN, print_fn=None)
            model.compile(keras.optimizers.Adam(LEARNING_RATE, epsilon=EPSILON))
            model.optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def train(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(targets, model(inputs, training=True))
            variables = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)
            return loss

        @tf.function(jit_compile=False)
        def step(inputs: Any, targets: Any) -> tf.Tensor:
            return strategy.reduce("SUM", strategy.run(train, (inputs, targets)), axis=None)

        self._step = step
        self._batch = [place_on_all(array, strategy) for array in token_batch(case)]

    def run(self, steps: int) -> tuple[float, float]:
        """Runs `steps` steps; returns seconds and the last loss."""
        return run_steps(self._step, self._batch, steps)
