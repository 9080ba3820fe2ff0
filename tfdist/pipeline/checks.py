"""Checks of what a pipelined model is given, when it is made and before it trains."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.sharding import config_of

_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


def check_module(module: keras.Model) -> None:
    """Raises NotImplementedError for a model that is no graph of layers, and so cannot be cut between layers."""
    if isinstance(module, keras.Sequential) or hasattr(module, "_nodes_by_depth"):
        return
    raise errors.not_implemented(
        "Only a model that is a graph of layers can be cut in stages: a functional model, a Sequential or a list of layers.",
        layers_or_model=type(module).__name__,
        fix="Build it with the functional API, or pass its layers as a list. A subclassed model may be a layer in it, which "
        "one stage computes.",
    )


def check_steps(module: keras.Model) -> None:
    """Raises NotImplementedError for a model with steps or losses of its own, which its stages would not compute."""
    own = [name for name in _STEPS if getattr(type(module), name) is not getattr(keras.Model, name)]
    if own:
        raise errors.not_implemented(
            f"{type(module).__name__} computes its own {', '.join(map(repr, own))}, which would be left out: the steps of a "
            "pipeline are those of `PipelineModel`.",
            layers_or_model=type(module).__name__,
            fix="Override it in a subclass of `tfdist.PipelineModel` (`compute_loss`, `compute_metrics`; `train_step` by way of "
            "`self.compute_gradients`), and wrap the model in that.",
        )


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Raises NotImplementedError for a strategy of several devices that is not tfdist's, and for `zero_stage=3`."""
    config = config_of(strategy)
    if config is None:
        if strategy.num_replicas_in_sync > 1:
            raise errors.not_implemented(
                "A `PipelineModel` needs a strategy of tfdist, or none.",
                strategy=type(strategy).__name__,
                fix="Use `tfdist.ShardedStrategy(pipeline_parallel_size=...)`.",
            )
        return
    if config.zero_stage == 3:
        raise errors.not_implemented(
            "A `PipelineModel` does not work with `zero_stage=3`: every microbatch would gather every layer again, forward "
            "and backward, num_microbatches times the traffic.",
            zero_stage=3,
            fix="Use `zero_stage=2`: the pipeline divides the parameters already.",
        )
