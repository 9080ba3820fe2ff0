"""tfdist: train Keras models that do not fit on one device.

strategy = tfdist.ShardedStrategy(zero_stage=3)   # was tf.distribute.MirroredStrategy()
with strategy.scope():
    model = build_model()
    model.compile(optimizer="adamw", loss="sparse_categorical_crossentropy")
model.fit(dataset)
"""

from tfdist import (
    autograph,
    checkpoint,
    collectives,
    data,
    kernels,
    layers,
    losses,
    mesh,
    metrics,
    optimizers,
    pipeline,
    sharding,
)
from tfdist.mesh import use_logical_cpus
from tfdist.optimizers import global_norm
from tfdist.pipeline import PipelineModel
from tfdist.profiling import memory_report
from tfdist.strategy import MultiWorkerShardedStrategy, ShardedStrategy
from tfdist.tensor_plans import TensorPlan, parallelize, suggest_plan

__version__ = "0.1.0"

__all__ = [
    "MultiWorkerShardedStrategy",
    "PipelineModel",
    "ShardedStrategy",
    "TensorPlan",
    "autograph",
    "checkpoint",
    "collectives",
    "data",
    "global_norm",
    "kernels",
    "layers",
    "losses",
    "memory_report",
    "mesh",
    "metrics",
    "optimizers",
    "parallelize",
    "pipeline",
    "sharding",
    "suggest_plan",
    "use_logical_cpus",
]
