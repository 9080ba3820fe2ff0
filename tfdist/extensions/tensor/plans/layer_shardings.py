"""A plan applied to a model: what is to be done with each layer."""

import dataclasses
from collections.abc import Mapping

import keras

from tfdist import errors
from tfdist.extensions.tensor.plans.layer_kinds import (
    COLUMN,
    KINDS,
    REPLICATE,
    ROW,
    is_attention,
    path_of,
    roles_of,
    sharded_sizes,
)
from tfdist.extensions.tensor.plans.model_graph import ModelGraph, ShardableLayer, trace_model
from tfdist.extensions.tensor.plans.pairing import biases_to_gather, pair
from tfdist.extensions.tensor.plans.plan import TensorPlan, matches
from tfdist.extensions.tensor.sharded_weights import ShardedWeights
from tfdist.sharding import layers_within


@dataclasses.dataclass(frozen=True, eq=False)
class LayerSharding:
    """How one layer is sharded over the tensor ranks.

    Attributes:
        layer: the Keras layer.
        path: its path in the model.
        role: "column", "row" or "vocab".
        gather_output: a Dense or EinsumDense sharded by column must give its whole output, and a ReversibleEmbedding its whole
            logits. An activation that is not elementwise, such as softmax, comes after the gather. Of an attention that returns a
            bias of its scores: it must give that of all heads. False for all else: their output is whole, or stays local.
        input_is_parallel: a Dense or EinsumDense sharded by row gets its own part of the input, which an earlier layer left
            local.
    """

    layer: keras.Layer
    path: str
    role: str
    gather_output: bool
    input_is_parallel: bool

    @property
    def is_paired(self) -> bool:
        """Whether its output stays local up to layers sharded by row, or its input comes local from layers sharded by column."""
        is_local = self.input_is_parallel or self.role == COLUMN and not self.gather_output
        return is_local and not is_attention(self.layer)


def resolve(model: keras.Model, plan: Mapping[str, str], tensor_parallel_size: int) -> list[LayerSharding]:
    """Returns how a plan shards the layers of a built model, in the order of their calls, after checking that it can be done.

    Raises:
        ValueError: the plan or the size is not valid; a pattern matches nothing; a layer cannot be sharded in its role; or a size
            that is sharded is not divisible by `tensor_parallel_size`.
        NotImplementedError: a layer that could be sharded is quantized, runs in a loop, or shares its weights.
    """
    plan = plan if isinstance(plan, TensorPlan) else TensorPlan(plan)
    errors.check_integer("tensor_parallel_size", tensor_parallel_size, 1)
    graph = trace_model(model)
    roles = planned_roles(model, graph, plan)
    for shardable in graph.layers:
        if shardable.layer in roles:
            check_sharding(shardable, roles[shardable.layer], tensor_parallel_size)
    shardings = layer_shardings(graph, roles)
    for sharding in shardings:
        if sharding.gather_output and isinstance(sharding.layer, keras.layers.BatchNormalization):
            raise errors.value_error(
                "`plan` shards a BatchNormalization that does not stand between layers sharded by column and by row.",
                layer=sharding.path,
                role=sharding.role,
                fix='Shard the layers before and after it, too, or give it the role "replicate".',
            )
    return shardings


def layer_shardings(graph: ModelGraph, roles: Mapping[keras.Layer, str]) -> list[LayerSharding]:
    """Returns how layers are sharded that have these roles: with a gather, or a whole input, where the graph needs one."""
    local, parallel = pair(graph, roles)
    gathered_biases = biases_to_gather(graph, roles)
    return [
        LayerSharding(
            layer=known.layer,
            path=known.path,
            role=role,
            gather_output=isinstance(known.layer, keras.layers.ReversibleEmbedding)
            or known.layer in gathered_biases
            or (role == COLUMN and not known.kind.is_attention and known.layer not in local),
            input_is_parallel=role == ROW and known.layer in parallel,
        )
        for known in graph.layers
        if (role := roles.get(known.layer)) is not None
    ]


def planned_roles(model: keras.Model, graph: ModelGraph, plan: TensorPlan) -> dict[keras.Layer, str]:
    """Returns the role of each layer that the plan shards; raises ValueError for a pattern or a layer that cannot be meant."""
    layers = layers_within(model)[1:]
    parts = {part for layer in layers if is_attention(layer) for part in layers_within(layer)[1:]}
    layers = [layer for layer in layers if layer not in parts]
    shardable = {known.layer for known in graph.layers}
    chosen = {layer: pattern for layer in layers if (pattern := plan.pattern_of(layer)) is not None}
    for pattern, role in plan.items():
        if not any(matches(pattern, layer) for layer in layers if layer.weights):
            raise errors.value_error(
                "`plan` must have patterns that match a layer with weights.",
                pattern=pattern,
                paths=[known.path for known in graph.layers],
            )
        mine = [layer for layer, its_pattern in chosen.items() if its_pattern == pattern and layer.weights]
        # A pattern that matches a block is meant for the layers in it.
        blocks = [layer for layer in mine if layer not in shardable and len(layers_within(layer)) > 1]
        leaves = [layer for layer in mine if layer not in blocks]
        wrong = [layer for layer in leaves if layer not in shardable] if leaves else blocks
        if wrong and role != REPLICATE:
            raise _not_shardable(wrong[0], pattern, role)
    return {layer: plan[chosen[layer]] for layer in chosen if layer in shardable and plan[chosen[layer]] != REPLICATE}


def check_sharding(shardable: ShardableLayer, role: str, tensor_parallel_size: int) -> None:
    """Raises unless the layer can be sharded in this role over so many ranks."""
    named = {"layer": shardable.path, "role": role}
    if role not in roles_of(shardable.layer):
        raise errors.value_error(
            f"`plan` must give a {shardable.kind.name} one of the roles {(*roles_of(shardable.layer), REPLICATE)}.", **named
        )
    if shardable.obstacle is not None:
        raise errors.not_implemented(
            f"`plan` shards a layer that tfdist cannot shard: {shardable.obstacle}.",
            **named,
            fix='Give it the role "replicate".',
        )
    for name, size in sharded_sizes(shardable.layer, role, tensor_parallel_size).items():
        if size % tensor_parallel_size:
            below = size // tensor_parallel_size * tensor_parallel_size
            nearest = [str(near) for near in (below, below + tensor_parallel_size) if near]
            raise errors.value_error(
                f"`tensor_parallel_size` must divide the {name} of a layer that is sharded by {role}.",
                tensor_parallel_size=tensor_parallel_size,
                layer=shardable.path,
                **{name: size},
                fix=f'Nearest sizes: {" and ".join(nearest)}. Or give the layer the role "replicate".',
            )


def _not_shardable(layer: keras.Layer, pattern: str, role: str) -> ValueError:
    if isinstance(layer, ShardedWeights):
        return errors.value_error(
            "`plan` matches a layer that is sharded already: one of `tfdist.layers`, or of a model that was parallelized before.",
            pattern=pattern,
            role=role,
            layer=path_of(layer),
            fix="Name the layers that are not sharded yet.",
        )
    *names, last = [kind.name for kind in KINDS]
    return errors.value_error(
        f"`plan` can shard {', '.join(names)} and {last} layers, and subclasses that keep their `call`.",
        pattern=pattern,
        role=role,
        layer=path_of(layer),
        type=type(layer).__name__,
        fix='Narrow the pattern, or give this layer the role "replicate" before it.',
    )
