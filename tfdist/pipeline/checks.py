"""Checks of what a pipelined model is given, when it is made and before it trains."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.sharding import config_of


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


def check_batch_size(x: Any, batch_size: int | None, validation_split: float, num_microbatches: int, replicas: int) -> None:
    """Raises ValueError for arrays that do not divide into batches whose microbatches are all equal.

    `x`, `batch_size` and `validation_split` are the arguments of `fit`; the model has `replicas` data ranks.
    """
    multiple = num_microbatches * replicas
    leaves = tf.nest.flatten(x)
    if not leaves or not all(hasattr(leaf, "shape") and len(leaf.shape) for leaf in leaves):
        return  # a dataset, a generator, ...: the step sees what it gets
    size, rows = batch_size or 32, int(leaves[0].shape[0] * (1 - (validation_split or 0.0)))
    last = rows % size
    if size % multiple == 0 and last % multiple == 0:
        return
    what = f"`batch_size` is {size}" if size % multiple else f"the last of the batches of {size} has {last} of the {rows} rows"
    raise errors.value_error(
        f"Batches must be multiples of `num_microbatches` x data ranks = {num_microbatches} x {replicas} = {multiple} rows, "
        f"so that microbatches are equal, but {what}.",
        batch_size=batch_size,
        num_microbatches=num_microbatches,
        fix=f"Use a `batch_size` such as {max(size // multiple, 1) * multiple}, and as many rows as fill whole batches.",
    )
