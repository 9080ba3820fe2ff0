"""The kinds of steps that run on null GPUs. Each is a function that makes a strategy and returns it with one step to call.

Batches have static shapes: what TensorFlow computes of an unknown one on a GPU is anything, since kernels compute nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.null_gpu import device
from tfdist.extensions.compression import TopK

Step = Callable[[], Any]
Case = Callable[[], tuple[tf.distribute.Strategy, Step]]

WIDTH, ROWS = 16, 4  # of the model's layers; of a replica's batch


def make_strategy(**settings: Any) -> tf.distribute.Strategy:
    """Over the workers of a job, or over this process's GPUs."""
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec()
    number = settings.pop("devices", None)
    if cluster.jobs:
        return tfdist.MultiWorkerShardedStrategy(**settings)
    devices = None if number is None else [f"GPU:{index}" for index in range(number)]
    return tfdist.ShardedStrategy(devices, **settings)


def dense_model(layers: int = 4, tensor_parallel: bool = False, width: int = WIDTH) -> keras.Model:
    """Dense layers, an even number; tensor-parallel ones in pairs."""
    stack = [keras.Input((width,))]
    for index in range(0, layers, 2):
        if tensor_parallel:
            stack.append(tfdist.layers.ColumnParallelDense(2 * width, gather_output=False, name=f"dense_{index}"))
            stack.append(tfdist.layers.RowParallelDense(width, input_is_parallel=True, name=f"dense_{index + 1}"))
        else:
            stack += [keras.layers.Dense(2 * width, name=f"dense_{index}"), keras.layers.Dense(width, name=f"dense_{index + 1}")]
    return keras.Sequential(stack)


def step_of(strategy: tf.distribute.Strategy, model: keras.Model, width: int = WIDTH) -> Step:
    """Returns one traced training step on a batch of zeros."""
    model.optimizer.build(model.trainable_variables)
    x, y = [strategy.experimental_distribute_values_from_function(lambda _: tf.zeros([ROWS, width])) for _ in range(2)]

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> Any:
        return strategy.run(lambda x, y: model.train_step((x, y)), (x, y))

    return functools.partial(step, x, y)


def dense(optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(), policy: str = "float32", **settings: Any) -> Any:
    strategy = make_strategy(**settings)
    width = 64 if "gradient_compression" in settings else WIDTH  # kernels of fewer than 4,096 numbers travel exactly
    with strategy.scope():
        keras.config.set_dtype_policy(policy)
        try:
            model = dense_model(tensor_parallel="tensor_parallel_size" in settings, width=width)
        finally:
            keras.config.set_dtype_policy("float32")
        model.compile(optimizer(), loss="mse", auto_scale_loss=False)
    return strategy, step_of(strategy, model, width)


def pipeline(schedule: str = "1f1b", microbatches: int = 4, recompute: bool = False, **settings: Any) -> Any:
    size = settings.setdefault("pipeline_parallel_size", 2)
    strategy = make_strategy(**settings)
    rounds = 2 if schedule == "interleaved" else 1
    with strategy.scope():
        model = tfdist.PipelineModel(
            dense_model(2 * size * rounds, tensor_parallel="tensor_parallel_size" in settings),
            num_microbatches=microbatches,
            schedule=schedule,
            stages_per_rank=rounds,
            recompute=recompute,
        )
        model.compile(keras.optimizers.Adam(), loss="mse")
    return strategy, step_of(strategy, model)


def fitted(**settings: Any) -> Any:
    """An epoch of `fit`, whose last batch has one row, so that other ranks have none.

    The loss is one of every number: TensorFlow's gradient of a sum over one axis computes a shape on the GPU where the rows are
    unknown, and so reads anything there.
    """
    strategy = make_strategy(**settings)
    with strategy.scope():
        model = dense_model(2)
        model.compile(keras.optimizers.Adam(), loss=lambda y, x: tf.square(y - x))
    rows = np.zeros([2 * ROWS * strategy.num_replicas_in_sync + 1, WIDTH], "float32")  # a null GPU makes none
    data = tf.data.Dataset.from_tensor_slices((rows, rows)).batch(ROWS * strategy.num_replicas_in_sync)

    def epoch() -> None:
        device.set_condition(True)  # Keras asks a GPU whether there was a batch
        model.fit(data, verbose=0)

    return strategy, epoch


def loss_scaled() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())


def case(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Case:
    return functools.partial(function, *arguments, **settings)


CASES: dict[str, Case] = {
    **{f"stage {stage}": case(dense, zero_stage=stage) for stage in range(4)},
    "clipped": case(dense, lambda: keras.optimizers.AdamW(global_clipnorm=1.0), zero_stage=2),
    "accumulation": case(dense, lambda: keras.optimizers.Adam(gradient_accumulation_steps=2), zero_stage=2),
    "loss scale": case(dense, loss_scaled, policy="mixed_float16", zero_stage=2),
    **{f"mixed float16, stage {stage}": case(dense, loss_scaled, policy="mixed_float16", zero_stage=stage) for stage in range(4)},
    **{f"mixed bfloat16, stage {stage}": case(dense, policy="mixed_bfloat16", zero_stage=stage) for stage in range(4)},
    **{
        f"{name}, stage {stage}": case(dense, zero_stage=stage, gradient_compression=name, parameter_compression=parameters)
        for name, stage, parameters in (("int8", 2, "int4"), ("top_k", 3, None), ("bfloat16", 1, "int8"))
    },
    **{
        f"error feedback, stage {stage}": case(dense, zero_stage=stage, gradient_compression=TopK(0.1, None, error_feedback=True))
        for stage in (0, 2)
    },
    "hybrid, stage 3": case(dense, zero_stage=3, sharding_group_size=2, ranks_per_host=2),
    "hybrid, stage 2": case(dense, zero_stage=2, sharding_group_size=2, ranks_per_host=2, gradient_compression="int8"),
    "fit": case(fitted, zero_stage=3, devices=2),
    "owners": case(dense, lambda: keras.optimizers.Muon(), zero_stage=2),
    "tensor 2": case(dense, zero_stage=2, tensor_parallel_size=2),
    "tensor 2, loss scale": case(dense, loss_scaled, policy="mixed_float16", zero_stage=2, tensor_parallel_size=2),
    "tensor 2, stage 3": case(dense, zero_stage=3, tensor_parallel_size=2),
    "pipeline 2": case(pipeline, zero_stage=2),
    "pipeline 2, gpipe": case(pipeline, "gpipe", zero_stage=1),
    "pipeline 2, stage 3": case(pipeline, zero_stage=3),
    "pipeline 2, recomputed": case(pipeline, recompute=True, zero_stage=0),
    "pipeline 2, tensor 2": case(pipeline, zero_stage=2, tensor_parallel_size=2),
    "pipeline 4": case(pipeline, zero_stage=2, pipeline_parallel_size=4),
    "pipeline 4, interleaved": case(pipeline, "interleaved", zero_stage=2, pipeline_parallel_size=4),
    "pipeline 4, zero bubble": case(pipeline, "zero_bubble", zero_stage=2, pipeline_parallel_size=4),
    "pipeline 4, tensor 2": case(pipeline, zero_stage=2, pipeline_parallel_size=4, tensor_parallel_size=2),
    "2 x 2 x 2": case(pipeline, zero_stage=3, tensor_parallel_size=2),
}
