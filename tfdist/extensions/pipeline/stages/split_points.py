"""Where a model is split in stages: what a user may give as `stages`, or, without it, where the stages cost alike."""

import difflib
import itertools
import math
import numbers
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras

from tfdist import errors
from tfdist.extensions.pipeline.stages.costs import node_costs
from tfdist.extensions.pipeline.stages.stage import nodes_in_order

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
            computation, after the first.
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
    if split_points and split_points[0] == 0:
        raise errors.value_error(
            f"`stages` must leave stage 0 a layer, but {stages[0]!r} is the first.",
            stages=stages,
            fix="Stage 0 is not in the list: begin with the first layer of stage 1.",
        )
    for index, (before, place) in enumerate(itertools.pairwise(split_points), 1):
        if place <= before:
            raise errors.value_error(
                f"`stages` must be in the order of computation, but {stages[index]!r} does not come after "
                f"{stages[index - 1]!r}: stage {index} would be empty.",
                stages=stages,
            )
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
    """Returns what is balanced between stages: a number for each of `nodes_in_order(module)`.

    It compares FLOPs first and, where those are alike, bytes. A backward pass has twice the FLOPs of the forward pass in every
    layer, so those of the forward pass will do.
    """
    costs = node_costs(module)
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


def balanced_split_points(costs: Sequence[float], num_parts: int) -> list[int]:
    """Splits a sequence in parts, none empty, so that the largest sum of a part is as small as can be.

        costs     3  1  1  4  2  2        3 parts
        parts    [3  1  1][4][2  2]       sums 5, 4, 4

    A pipeline is as fast as its slowest stage. Among the splits with the least largest sum this one has the least sum of squares,
    so that the sums are as even as can be. Both minima are exact, also for integers of any size.

    Args:
        costs: the costs of the items, finite and not negative.
        num_parts: how many parts.

    Returns:
        The places before which a part begins, ascending, without 0: `num_parts - 1` of them.

    Raises:
        ValueError: there are fewer items than parts, `num_parts` is less than 1, or a cost is negative or not finite.
    """
    if not 1 <= num_parts <= len(costs):
        raise errors.value_error(
            f"`num_parts` must be at least 1 and at most {len(costs)}, the number of costs, so that no part is empty.",
            num_parts=num_parts,
        )
    wrong = [cost for cost in costs if not 0 <= cost < math.inf]
    if wrong:
        raise errors.value_error("`costs` must be finite and not negative.", costs=wrong)
    sums = list(itertools.accumulate(costs, initial=0))
    enough = -(-sums[-1] // num_parts) + 2 * max(costs)  # for parts that are filled one after the other
    largest, _ = _best_split(sums, num_parts, max, enough)
    return _best_split(sums, num_parts, lambda squares, part: squares + part**2, largest)[1]


def _best_split(
    sums: Sequence[float], num_parts: int, add: Callable[[float, float], float], largest: float
) -> tuple[float, list[int]]:
    """Returns the least score of the splits that leave no part above `largest`, and the split points of one that has it.

    `sums` are those of the first 0, 1, ... items. `add(score, part)` is the score of parts and one more.
    """
    count = len(sums) - 1
    scores: dict[int, float] = {0: 0}  # the least, by how many items are in parts
    chosen: list[dict[int, int]] = []  # where the last of 1, 2, ... parts starts
    for _ in range(num_parts):
        before, scores = scores, {}
        chosen.append({})
        for stop in range(1, count + 1):
            for start in range(stop - 1, -1, -1):
                part = sums[stop] - sums[start]
                if part > largest:
                    break
                if start in before and (stop not in scores or add(before[start], part) < scores[stop]):
                    scores[stop], chosen[-1][stop] = add(before[start], part), start
    bounds = [count]
    for starts in reversed(chosen):
        bounds.insert(0, starts[bounds[0]])
    return scores[count], bounds[1:-1]
