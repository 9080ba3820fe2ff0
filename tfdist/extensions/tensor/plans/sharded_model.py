"""Sharding the layers of a model that exists."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfdist import errors
from tfdist.extensions.tensor.plans.layer_kinds import COLUMN, ROW, kind_of, sharded_weights
from tfdist.extensions.tensor.plans.layer_shardings import LayerSharding, resolve
from tfdist.keras_layers.in_stages import InStages
from tfdist.sharding import config_of, kept_placement
from tfdist.sharding.deferral import DEFERRAL
from tfdist.tables import table_lines


def parallelize(model: keras.Model, plan: Mapping[str, str], print_fn: Callable[[str], Any] | None = print) -> keras.Model:
    """Shards the layers of a model over the tensor ranks of its strategy, in place, as a plan says. Its weights keep their
    values.

        strategy = tfdist.ShardedStrategy(tensor_parallel_size=2)
        with strategy.scope():
            model = build_plain_keras_model()
            tfdist.parallelize(model, {r"mlp_in$": "column", r"mlp_out$": "row", "attention": "column", "embedding": "vocab"})
            model.compile(...)

    Each layer that is sharded becomes the layer of `tfdist.layers` of its kind: it saves and loads as before, and outside
    replicas it is the Keras layer. Where the strategy has no tensor axis the plan is checked and nothing changes. A
    model for a pipeline is sharded before it is given to `tfdist.PipelineModel`.

    Life of a layer: its weights are sharded, each rank keeps 1/t; a column-parallel layer whose output goes to row-parallel
    layers only, by way of elementwise operations, leaves it sharded, and all others gather it.

    The mistake to avoid: calling it after the optimizer has been built: its state has the shapes of whole weights. It raises.

    Args:
        model: built, in the scope of the strategy that will train it.
        plan: an ordered mapping from regular expressions on layer or variable paths to "column", "row", "vocab" or "replicate";
            the first that matches counts. `tfdist.suggest_plan` makes one.
        print_fn: is given a table of what was done; None: nothing is printed.

    Returns:
        `model`.

    Raises:
        ValueError: the model was not built in the scope of a tfdist strategy, or its optimizer is built, or it is in a
            `PipelineModel` already. Or the plan has a pattern that matches nothing, a layer that cannot be sharded so, or a
            sharding that does not divide.
        NotImplementedError: a layer is quantized, runs in a loop, or shares its weights.

    Source: Keras's `LayoutMap`, for the form of the plan; PyTorch's `parallelize_module`.
    """
    strategy = _strategy_of(model)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        raise errors.value_error(
            "`model` has an optimizer that is built already, on weights that are whole.",
            model=model.name,
            fix="Call `tfdist.parallelize` before `compile`, or before the first step.",
        )
    size = strategy.mesh.tensor_parallel_size
    shardings = resolve(model, plan, size)
    done = _described(shardings, size)
    if size > 1:
        with strategy.scope():
            for sharding in shardings:
                _apply(sharding)
    if print_fn is not None:
        print_fn(done)
    return model


def _strategy_of(model: Any) -> Any:
    if not isinstance(model, keras.Model) or not model.built:
        raise errors.value_error(
            "`model` must be a built `keras.Model`.", model=model, fix="Call it, or `model.build(input_shape)`, in the scope."
        )
    # Whether it is known which ranks of a pipeline keep the weights.
    if isinstance(model, InStages) or any("pipe_owners" in kept_placement(variable) for variable in model.variables):
        raise errors.value_error(
            "`model` must not be in a `PipelineModel` yet: there its layers are those of stages.",
            model=model.name,
            fix="Call `tfdist.parallelize` on the model before, and give that to `PipelineModel`.",
        )
    strategies = {id(found): found for found in map(DEFERRAL.now.strategy_of, model.variables)}
    strategy = next(iter(strategies.values()), None)
    if len(strategies) != 1 or config_of(strategy) is None:
        raise errors.value_error(
            "`model` must have been built in the scope of one tfdist strategy.",
            model=model.name,
            made_by=sorted(type(found).__name__ for found in strategies.values()),
            fix="Build it inside `with strategy.scope():`, and load or set its weights then.",
        )
    return strategy


def _apply(sharding: LayerSharding) -> None:
    layer = sharding.layer
    layer.__class__ = _parallel_class(layer, sharding.role)
    if hasattr(type(layer), "gather_output") or (sharding.role == COLUMN and hasattr(layer, "kernel")):
        layer.gather_output = sharding.gather_output
    if sharding.role == ROW:
        layer.input_is_parallel = sharding.input_is_parallel
    layer.shard_weights()


def _parallel_class(layer: keras.Layer, role: str) -> type:
    """Returns the parallel class for layers of a class of Keras or KerasHub, or of one that inherits its computation."""
    layer_class, parallel = type(layer), kind_of(layer).parallel[role]
    if issubclass(parallel, layer_class):
        return parallel
    return type(layer_class.__name__, (parallel, layer_class), {"__module__": layer_class.__module__})


def _described(shardings: Sequence[LayerSharding], size: int) -> str:
    if not shardings:
        return "Nothing is sharded."
    rows: list[tuple[str, ...]] = [("layer", "sharded by", "parameters", "of one rank", "output")]
    for sharding in shardings:
        of_all = of_one = 0
        for weight, axis in sharded_weights(sharding.layer, sharding.role, size):
            of_all += math.prod(weight.shape)
            of_one += math.prod(-(-length // size) if place == axis else length for place, length in enumerate(weight.shape))
        is_local = sharding.role == COLUMN and hasattr(sharding.layer, "kernel") and not sharding.gather_output
        rows.append((sharding.path, sharding.role, f"{of_all:,}", f"{of_one:,}", "sharded" if is_local else "whole"))
    header, *lines = table_lines(rows, "<<>><")
    rule = "-" * max(map(len, (header, *lines)))
    return "\n".join([f"{len(shardings)} layers are sharded over {size} tensor ranks", header, rule, *lines])
