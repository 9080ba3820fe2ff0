"""The gpt, its blocks in the stages of a `tfdist.PipelineModel`."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import tfdist
from benchmarks.cases import Case
from benchmarks.devices import take_devices
from benchmarks.gpt_arrays import EPSILON, LEARNING_RATE, WEIGHT_DECAY, initial_weight, token_batch
from benchmarks.training import build_model, place_on_all, run_steps


def build_pipeline(case: Case) -> tuple[tf.distribute.Strategy, tfdist.PipelineModel]:
    """Makes the case's strategy, and under it the model, compiled: cut before blocks, as many in each stage."""
    settings = {"zero_stage": 0, "pipeline_parallel_size": case.devices}
    if case.multi_worker:
        strategy = tfdist.MultiWorkerShardedStrategy(**settings)
    else:
        strategy = tfdist.ShardedStrategy(take_devices(case.devices, case.logical_gpus), **settings)
    with strategy.scope():
        model = tfdist.PipelineModel(
            build_model(case),
            num_microbatches=case.num_microbatches,
            schedule=case.schedule,
            stages=[f"block_{case.blocks_of(stage).start}_attention_norm" for stage in range(1, case.num_stages)],
            stages_per_rank=case.stages_per_rank,
        )
        for variable in model.module.variables:
            variable.assign(initial_weight(variable.path, variable.shape))
        optimizer = keras.optimizers.AdamW(LEARNING_RATE, epsilon=EPSILON, weight_decay=WEIGHT_DECAY)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        optimizer.build(model.trainable_variables)
    return strategy, model


class PipelineLoop:
    """A `tf.function` around `strategy.run`: the schedule, and the optimizer. Every rank has the whole batch on its device."""

    def __init__(self, case: Case):
        strategy, self.model = build_pipeline(case)

        def train(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
            loss, gradients = self.model.compute_gradients(inputs, targets)
            self.model.optimizer.apply_gradients(gradients)
            return loss

        @tf.function(jit_compile=False)
        def step(inputs: Any, targets: Any) -> tf.Tensor:
            return strategy.reduce("SUM", strategy.run(train, (inputs, targets)), axis=None)

        self._step = step
        self._batch = [place_on_all(array, strategy) for array in token_batch(case)]

    def run(self, steps: int) -> tuple[float, float]:
        """Runs `steps` steps; returns seconds and the last loss."""
        return run_steps(self._step, self._batch, steps)
