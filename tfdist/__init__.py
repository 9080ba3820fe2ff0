"""tfdist: train Keras models that do not fit on one device.

strategy = tfdist.ShardedStrategy(zero_stage=3)   # was tf.distribute.MirroredStrategy()
with strategy.scope():
    model = build_model()
    model.compile(optimizer="adamw", loss="sparse_categorical_crossentropy")
model.fit(dataset)
"""

import importlib
import typing

# What Keras loads by name (layers, losses, models) must be registered before a file is read: nothing here is imported late.
import tfdist.extensions  # noqa: F401  each adds itself to the core
from tfdist import collectives, losses, optimizers
from tfdist.keras_layers import recompute
from tfdist.mesh import use_logical_cpus, use_logical_gpus
from tfdist.optimizers import clip_by_global_norm, global_norm
from tfdist.profiling import memory_report
from tfdist.sharding import ShardingConfig
from tfdist.strategy import MultiWorkerShardedStrategy, ShardedStrategy

if typing.TYPE_CHECKING:
    from tfdist import compression, layers, pipeline
    from tfdist.extensions.tensor.plans import TensorPlan, parallelize, suggest_plan
    from tfdist.pipeline import PipelineModel
    from tfdist.tools.planning import plan

__version__ = "0.1.0"

__all__ = [
    "MultiWorkerShardedStrategy",
    "PipelineModel",
    "ShardedStrategy",
    "ShardingConfig",
    "TensorPlan",
    "clip_by_global_norm",
    "collectives",
    "compression",
    "global_norm",
    "layers",
    "losses",
    "memory_report",
    "optimizers",
    "parallelize",
    "pipeline",
    "plan",
    "recompute",
    "suggest_plan",
    "use_logical_cpus",
    "use_logical_gpus",
]


# What is beside the core: extensions, which may be missing, and tools, which are imported when they are asked for.
_BESIDE = {
    **dict.fromkeys(["compression", "layers", "pipeline"], ""),
    "PipelineModel": "tfdist.pipeline",
    **dict.fromkeys(["TensorPlan", "parallelize", "suggest_plan"], "tfdist.extensions.tensor.plans"),
    "plan": "tfdist.tools.planning",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _BESIDE:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    module = _BESIDE[name]
    return getattr(importlib.import_module(module), name) if module else importlib.import_module(f"tfdist.{name}")
