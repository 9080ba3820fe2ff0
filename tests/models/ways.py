"""Ways to train a family of models over several devices, and on one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from training import one_device, strategy_for

import tfdist
from tests.models import families
from tests.parity.comparison import state
from tfdist.extensions.tensor.plans import suggest


@dataclasses.dataclass(frozen=True)
class Way:
    """How a model is trained.

    Attributes:
        devices: how many.
        settings: those of the strategy.
        builds: returns the model of a family, in the strategy's scope.
        of_one_device: the way in which one device trains that is to be equal.
    """

    devices: int
    settings: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    builds: Callable[[str], keras.Model] = lambda family: families.FAMILIES[family]()
    of_one_device: str = "plain"


def suggested_where_links_are_fast(model: keras.Model) -> tfdist.TensorPlan:
    """The plan for the ranks of the strategy whose scope this is; models of tests are too small for links as they are."""
    before = suggest.BREAK_EVEN_VECTORS
    suggest.BREAK_EVEN_VECTORS = 4
    try:
        return tfdist.suggest_plan(model, tf.distribute.get_strategy().mesh.tensor_parallel_size)
    finally:
        suggest.BREAK_EVEN_VECTORS = before


def everything_sharded(family: str) -> keras.Model:
    model = families.FAMILIES[family]()
    plan = suggested_where_links_are_fast(model)
    assert sum(sharding.role != "replicate" for sharding in plan.shardings) > 6, plan
    assert sum(sharding.is_paired for sharding in plan.shardings) >= 4, plan
    return tfdist.parallelize(model, plan, print_fn=None)


def with_lora(family: str, builds: Callable[[str], keras.Model] = Way.builds) -> keras.Model:
    model = builds(family)
    backbone = families.backbone_of(model)
    if isinstance(backbone, families.hub().models.Backbone):
        backbone.enable_lora(2)
    else:  # T5's backbone, whose names Keras gives: what it projects queries and values by
        for layer in model._flatten_layers():
            if layer.name in ("query_projector", "value_projector"):
                layer.enable_lora(2)
    for layer in model._flatten_layers():
        if getattr(layer, "lora_enabled", False):  # what is zero has no gradient for the other factor: nothing would be compared
            value = np.random.default_rng(5).normal(scale=0.1, size=layer.lora_kernel_b.shape)
            layer.lora_kernel_b.assign(value)
    return model


BLOCKS = r"(layer|block)_\d+$"


def recomputed(family: str, builds: Callable[[str], keras.Model] = Way.builds) -> keras.Model:
    return tfdist.recompute(builds(family), BLOCKS)


def in_a_scope(family: str) -> keras.Model:
    with keras.RematScope(mode="full"):
        return families.FAMILIES[family]()


def staged(family: str, builds: Callable[[str], keras.Model] = Way.builds, **options: Any) -> keras.Model:
    return tfdist.PipelineModel(builds(family), num_microbatches=2, **options)


ONE_DEVICE = {"plain": Way.builds, "LoRA": with_lora}

WAYS = {
    "stage 0": Way(2, {"zero_stage": 0}),
    "stage 1": Way(2, {"zero_stage": 1}),
    "stage 2": Way(2, {"zero_stage": 2}),
    "stage 3": Way(2, {"zero_stage": 3}),
    "tensor 2": Way(2, {"zero_stage": 0, "tensor_parallel_size": 2}, everything_sharded),
    "tensor 2, stage 3": Way(4, {"zero_stage": 3, "tensor_parallel_size": 2}, everything_sharded),
    "pipeline 2": Way(2, {"zero_stage": 0, "pipeline_parallel_size": 2}, staged),
    "pipeline 2, stage 3": Way(4, {"zero_stage": 3, "pipeline_parallel_size": 2}, staged),
    "pipeline 2, 2 data ranks": Way(4, {"zero_stage": 1, "pipeline_parallel_size": 2}, staged),
    "pipeline 2, recompute": Way(2, {"zero_stage": 0, "pipeline_parallel_size": 2}, functools.partial(staged, recompute=True)),
    "pipeline 2, LoRA": Way(
        2, {"zero_stage": 0, "pipeline_parallel_size": 2}, functools.partial(staged, builds=with_lora), "LoRA"
    ),
    "LoRA": Way(2, {"zero_stage": 3}, with_lora, "LoRA"),
    "LoRA, tensor 2": Way(
        2, {"zero_stage": 0, "tensor_parallel_size": 2}, functools.partial(with_lora, builds=everything_sharded), "LoRA"
    ),
    "recompute": Way(2, {"zero_stage": 0}, recomputed),
    "recompute, stage 3": Way(2, {"zero_stage": 3}, recomputed),
    "recompute by `keras.RematScope`, stage 3": Way(2, {"zero_stage": 3}, in_a_scope),
    "recompute, LoRA": Way(2, {"zero_stage": 3}, functools.partial(recomputed, builds=with_lora), "LoRA"),
    "recompute, pipeline 2, stage 3": Way(
        4,
        {"zero_stage": 3, "pipeline_parallel_size": 2},
        functools.partial(staged, builds=recomputed, reshard_after_microbatch=True),
    ),
    "recompute, tensor 2": Way(
        4, {"zero_stage": 3, "tensor_parallel_size": 2}, functools.partial(recomputed, builds=everything_sharded)
    ),
}


def train(strategy: tf.distribute.Strategy, family: str, builds: Callable[[str], keras.Model]) -> dict[str, Any]:
    """Trains six steps with `fit` and returns the losses, weights, slots and predictions."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    x, y, weights = families.data(family)
    with strategy.scope():
        model = builds(family)
        model.compile(families.optimizer(family), families.loss(), weighted_metrics=[])
    losses: list[float] = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"])))
    model.fit(x, y, sample_weight=weights, batch_size=families.BATCH, shuffle=False, verbose=0, callbacks=[record])
    assert len(losses) == families.ROWS // families.BATCH and max(losses) > min(losses)
    return {"losses": losses, **state(model), "predictions": model.predict(x, batch_size=8, verbose=0)}


@functools.cache
def on_one_device(family: str, way: str = "plain") -> dict[str, Any]:
    return train(one_device(), family, ONE_DEVICE[way])


def on_several(family: str, way: Way) -> dict[str, Any]:
    return train(strategy_for(way.devices, **way.settings), family, way.builds)
