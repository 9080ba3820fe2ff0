"""Where a model is split in stages: what a user may give as `stages`, or, without it, where the stages cost alike."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Collection, Sequence
from typing import Any

import keras

from tfdist import errors
from tfdist.pipeline.stages.balance import balanced_split_points
from tfdist.pipeline.stages.costs import Cost, node_costs
from tfdist.pipeline.stages.stage import nodes_in_order

_SHOWN_NAMES = 10


def resolve_split_points(module: keras.Model, stages: Sequence[str | int] | None, num_stages: int) -> list[int]:
    """Returns where a functional model is split in stages.

    A model of one stage is not split, however many `stages` are named: a program for a pipeline runs as it is on one device.

    Args:
        module: a built functional model.
        stages: the first layer of stage 1, 2, and so on: its name, or its place in `module.layers`, where InputLayers do not
            count. A layer that is called several times stands for its first call. None: the most expensive stage is cheapest.
        num_stages: how many stages there are.

    Returns:
        Places in `nodes_in_order(module)` before which a stage begins, ascending.

    Raises:
        ValueError: there are more stages than layers, or `stages` are not `num_stages - 1` of the model's layers, in the order of
            computation, behind the first.
    """
    nodes = nodes_in_order(module)
    if len(nodes) < num_stages:
        raise errors.value_error(
            f"More stages than layers: {num_stages} stages cannot be made of the {len(nodes)} layers and operations of "
            f"{module.name!r}, none empty.",
            fix="Take a smaller `pipeline_parallel_size` or `stages_per_rank`, or a model of more layers.",
        )
    if stages is None:
        return balanced_split_points(node_weights(module), num_stages) if num_stages > 1 else []
    if isinstance(stages, str) or not isinstance(stages, Sequence):
        raise errors.value_error("`stages` must be a sequence of names or places of layers, or None.", stages=stages)
    first_call: dict[str, int] = {}
    for place, node in enumerate(nodes):
        first_call.setdefault(node.operation.name, place)
    split_points = [first_call[_name(module, stage, first_call)] for stage in stages]
    _check_order(stages, split_points)
    if num_stages == 1:
        return []
    if len(split_points) != num_stages - 1:
        raise errors.value_error(
            f"`stages` must name the first layer of every stage but stage 0, {num_stages - 1} for {num_stages} stages, but "
            f"has {len(split_points)}.",
            stages=stages,
        )
    return split_points


def node_weights(module: keras.Model) -> list[int]:
    """Returns what is balanced between stages: a number for each of `nodes_in_order(module)`."""
    return _weigh(node_costs(module))


def _check_order(stages: Sequence[str | int], split_points: Sequence[int]) -> None:
    """Raises ValueError for split points between which a stage would be empty."""
    if split_points and split_points[0] == 0:
        raise errors.value_error(
            f"`stages` must leave stage 0 a layer, but {stages[0]!r} is the first.",
            stages=stages,
            fix="Stage 0 is not in the list: begin with the first layer of stage 1.",
        )
    for index in range(1, len(split_points)):
        if split_points[index] <= split_points[index - 1]:
            raise errors.value_error(
                f"`stages` must be in the order of computation, but {stages[index]!r} does not come after "
                f"{stages[index - 1]!r}: stage {index} would be empty.",
                stages=stages,
            )


def _weigh(costs: Sequence[Cost]) -> list[int]:
    """Returns one number for each cost, which compares FLOPs first and, where the FLOPs are alike, bytes.

    A backward pass has twice the FLOPs of the forward pass in every layer, so those of the forward pass will do.
    """
    sizes = [cost.weight_bytes + cost.activation_bytes for cost in costs]
    return [cost.flops * (1 + sum(sizes)) + size for cost, size in zip(costs, sizes, strict=True)]


def _name(module: keras.Model, stage: Any, names: Collection[str]) -> str:
    """Returns the name of the layer that an entry of `stages` means."""
    if isinstance(stage, numbers.Integral):
        layers = [layer for layer in module.layers if not isinstance(layer, keras.layers.InputLayer)]
        if 0 <= int(stage) < len(layers):
            return layers[stage].name
        raise errors.value_error(f"A place in `stages` must be from 1 to {len(layers) - 1}: {len(layers)} layers.", place=stage)
    if stage in names:
        return stage
    near = difflib.get_close_matches(str(stage), names) or list(names)[:_SHOWN_NAMES]
    raise errors.value_error(
        f"`stages` must name layers of {module.name!r}, but it has none of the name {stage!r}.",
        fix=f"Some that it has: {', '.join(map(repr, near))}.",
    )
