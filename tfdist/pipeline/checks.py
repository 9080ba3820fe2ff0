"""Checks of what a pipelined model is given, when it is made and before it trains."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.sharding import config_of

_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


def check_module(module: keras.Model, blocks: Sequence[str] | None) -> None:
    """Raises NotImplementedError for a model that is no graph of layers, and so cannot be cut between layers.

    Raises ValueError for `blocks` of one that is.
    """
    is_graph = isinstance(module, keras.Sequential) or hasattr(module, "_nodes_by_depth")
    if is_graph and blocks is not None:
        raise errors.value_error(
            "`blocks` are for subclassed models; a graph of layers is cut between any of them.",
            blocks=list(blocks),
            fix="Leave `blocks` out, and name the layers with which stages begin: `stages`.",
        )
    if is_graph or blocks is not None:
        return
    raise errors.not_implemented(
        "Only a model that is a graph of layers can be cut in stages: a functional model, a Sequential or a list of layers; of a "
        "subclassed model it must be known which layers are its blocks.",
        layers_or_model=type(module).__name__,
        fix='Name the attribute that holds its blocks, as in `PipelineModel(model, blocks="blocks", num_microbatches=...)`.',
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


def check_preprocessing(module: keras.Model) -> None:
    """Raises NotImplementedError for a task of KerasHub that preprocesses the data that it is given, as no pipeline does."""
    if hasattr(module, "preprocess_samples") and getattr(module, "preprocessor", None) is not None:
        raise errors.not_implemented(
            f"{type(module).__name__} preprocesses the data that its `fit` is given; a `PipelineModel` takes what the model "
            "computes on.",
            layers_or_model=type(module).__name__,
            fix="Make the model with `preprocessor=None`, and preprocess the data: `dataset.map(preprocessor)`.",
        )


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Raises NotImplementedError for a strategy of several devices that is not tfdist's."""
    if config_of(strategy) is None and strategy.num_replicas_in_sync > 1:
        raise errors.not_implemented(
            "A `PipelineModel` needs a strategy of tfdist, or none.",
            strategy=type(strategy).__name__,
            fix="Use `tfdist.ShardedStrategy(pipeline_parallel_size=...)`.",
        )
