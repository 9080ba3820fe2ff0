"""KerasHub's attention layers, their heads spread over the tensor ranks as those of Keras's own are.

KerasHub is not imported: its classes are known by name, and a model's layers are changed into subclasses of what they are.

    rank i of t: H / t query heads; K / t heads of keys and values, or, where t is a multiple of K, the one that its queries ask
                 whole projections: queries, keys, values by column, the output by row

Where t is a multiple of the K heads of keys and values, every rank keeps their projections whole and computes the one head that
its own queries use: "multi-query" attention (K = 1) and large t. Their gradients are then summands, added up over the ranks.

A call reads the numbers of heads of the layer in Python: within a replica those attributes give the rank's own numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.layers import regions, sharded_tensors
from tfdist.layers.parallel_dense import ColumnParallelDense, RowParallelDense
from tfdist.layers.parallel_einsum_dense import ColumnParallelEinsumDense, RowParallelEinsumDense
from tfdist.layers.randomness import sharded_region
from tfdist.layers.sharded_weights import ShardedWeights, check_divisible, check_is_sharded
from tfdist.layers.shared_heads import SharedHeadsEinsumDense, are_shared, check_heads
from tfdist.sharding import Shard
from tfdist.sharding.sharded_activations import copy_mask, shard_of


@dataclasses.dataclass(frozen=True)
class HeadedLayer:
    """How an attention class of KerasHub is made, by the names of its attributes and of its call's arguments.

    Attributes:
        class_name: the class.
        inputs: the arguments that are projected.
        queries: the projection of the queries.
        keys_values: the projections of keys and values.
        outputs: the projection of the output.
        query_heads: the number of query heads.
        key_value_heads: the number of heads of keys and values; None: as many as query heads.
        groups: the number of query heads for each of keys and values; None: the layer does not keep it.
        sizes: numbers that are multiples of the number of query heads.
        per_head: the layer's own weights, by the axis that is one entry a head.
        bias: the argument, also the second of the results, that is a tensor (batch, heads, target, source).
        norms: normalizations of each head, whose `scale` all heads share; None or missing where the layer has none.
    """

    class_name: str
    inputs: tuple[str, ...]
    queries: str
    keys_values: tuple[str, str]
    outputs: str
    query_heads: str
    key_value_heads: str | None = None
    groups: str | None = None
    sizes: tuple[str, ...] = ()
    per_head: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    bias: str | None = None
    norms: tuple[str, ...] = ()


_GROUPED: dict[str, Any] = {
    "inputs": ("hidden_states",),
    "queries": "_query_dense",
    "keys_values": ("_key_dense", "_value_dense"),
    "outputs": "_output_dense",
    "query_heads": "num_query_heads",
    "key_value_heads": "num_key_value_heads",
    "groups": "num_key_value_groups",
}
_UNDERSCORED: dict[str, Any] = {name: f"_{_GROUPED[name]}" for name in ("query_heads", "key_value_heads", "groups")}
_PLAIN: dict[str, Any] = {"queries": "query_dense", "keys_values": ("key_dense", "value_dense"), "outputs": "output_dense"}
_GEMMA: dict[str, Any] = {
    **_GROUPED,
    **_PLAIN,
    "inputs": ("x",),
    "sizes": ("hidden_dim",),  # only ever divided by the number of query heads
}

HEADED_LAYERS = (
    HeadedLayer(
        "CachedMultiHeadAttention",
        inputs=("query", "value", "key"),
        queries="_query_dense",
        keys_values=("_key_dense", "_value_dense"),
        outputs="_output_dense",
        query_heads="_num_heads",
    ),
    HeadedLayer("LlamaAttention", **_GROUPED),
    HeadedLayer("CachedMistralAttention", **{**_GROUPED, **_UNDERSCORED}),
    HeadedLayer("QwenAttention", **_GROUPED),
    HeadedLayer("Qwen3Attention", **_GROUPED, norms=("_query_dense_layer_norm", "_key_dense_layer_norm")),
    HeadedLayer("Phi3Attention", **{**_GROUPED, **_PLAIN}),
    HeadedLayer("CachedGemmaAttention", **_GEMMA),
    HeadedLayer("CachedGemma3Attention", **_GEMMA, norms=("query_norm", "key_norm")),
    HeadedLayer(
        "T5MultiHeadAttention",
        inputs=("hidden_states", "key_value_states"),
        queries="query_projector",
        keys_values=("key_projector", "value_projector"),
        outputs="output_projector",
        query_heads="num_heads",
        sizes=("inner_dim",),
        per_head={"relative_attention_bias": 1},
        bias="position_bias",
    ),
)
_MODULES = "keras_hub."
# The methods that a subclass may not replace: the tables above tell of these.
_METHODS = ("call", "_compute_attention", "_masked_softmax", "compute_bias", "_mask_sliding_window")


def headed_layer(layer: keras.Layer) -> tuple[HeadedLayer, type] | None:
    """Returns how a KerasHub attention is made, and the class that tells; None for other layers, and for subclasses that compute
    in another way."""
    for base in type(layer).__mro__:
        known = next((made for made in HEADED_LAYERS if made.class_name == base.__name__), None)
        if known is not None and base.__module__.startswith(_MODULES):
            same = all(getattr(type(layer), name, None) is getattr(base, name, None) for name in _METHODS)
            return (known, base) if same else None
    return None


def number_of_heads(layer: keras.Layer, made: HeadedLayer) -> tuple[int, int]:
    """Returns the numbers of query heads, and of heads of keys and values, outside replicas."""
    queries = vars(layer)[made.query_heads]
    return queries, vars(layer)[made.key_value_heads] if made.key_value_heads else queries


class _ParallelHubAttention(ShardedWeights):
    """A KerasHub attention of which each tensor rank computes some heads; mixed in before its class by `parallel_class`."""

    _made: HeadedLayer
    gather_output = (
        True  # the bias of the scores, if it returns one; False: it stays sharded, for attentions that are sharded too
    )

    def _shards(self) -> Mapping[str, Shard]:
        return {name: Shard(axis) for name, axis in self._made.per_head.items()}

    def shard_weights(self) -> None:
        """Shards the projections, of a layer that is built, by heads."""
        made, parts = self._made, regions.scope_tensor_size()
        queries, keys_values = number_of_heads(self, made)
        check_divisible(made.query_heads, queries, parts, self.name)
        check_heads(made.key_value_heads or made.query_heads, keys_values, parts, self.name)
        is_shared = are_shared(keys_values, parts)
        super().shard_weights()
        for name in (made.queries, *made.keys_values):
            dense = getattr(self, name)
            if is_shared and name != made.queries:
                dense.__class__ = SharedHeadsEinsumDense
                continue
            is_dense = isinstance(dense, keras.layers.Dense)
            dense.__class__ = ColumnParallelDense if is_dense else ColumnParallelEinsumDense
            dense.gather_output = False
            dense.input_has_entered = True
            dense.shard_weights()
        for name in made.norms:
            norm = getattr(self, name, None)
            if norm is not None:
                norm.__class__ = _entered_norm(norm.__class__)
        dense = getattr(self, made.outputs)
        dense.__class__ = RowParallelDense if isinstance(dense, keras.layers.Dense) else RowParallelEinsumDense
        dense.input_is_parallel = True
        dense.shard_weights()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Computes this rank's heads, and adds the ranks' outputs; outside replicas it is the KerasHub layer."""
        if regions.tensor_program() is None:
            return super().call(*args, **kwargs)
        made = self._made
        check_is_sharded(self, getattr(self, made.queries)._kernel)
        given = inspect.signature(super().call).bind(*args, **kwargs).arguments
        if given.get("cache") is not None:
            raise errors.not_implemented(
                f"A cache of keys and values in layer {self.name!r}, whose heads are spread over the tensor ranks.",
                fix="Generate outside `strategy.run`, as `generate` does: there the layer is whole.",
            )
        for name in made.inputs:
            x = given.get(name)
            if x is not None:
                given[name] = regions.copy_to(x, f"{self.name}/copy_to")  # one that is given twice enters once
                copy_mask(x, given[name])
        for name in ("attention_mask", made.bias):
            x = given.get(name)
            if x is not None and len(x.shape) == 4 and x.shape[1] != 1:
                given[name] = self._own_bias(x) if name == made.bias else self._own_heads(x)
        with sharded_region():
            outputs = super().call(**given)
        if given.get("return_attention_scores"):
            output, scores, *rest = outputs
            return (output, regions.gather_from(scores, 1, f"{self.name}/scores"), *rest)
        if made.bias is None:
            return outputs
        output, bias, *rest = outputs
        bias = sharded_tensors.mark(tf.identity(bias), 1)
        return (output, sharded_tensors.whole(bias) if self.gather_output else bias, *rest)

    def _own_heads(self, mask: Any) -> tf.Tensor:
        return regions.own_part(regions.tensor_program(), tf.convert_to_tensor(mask), 1)

    def _own_bias(self, bias: tf.Tensor) -> tf.Tensor:
        """Returns the bias of this rank's heads, of one that an earlier layer gathered, or left as it is here."""
        return bias if shard_of(bias) is not None else regions.scatter_to(bias, 1, f"{self.name}/{self._made.bias}")


@functools.cache
def _entered_norm(norm_class: Any) -> Any:
    """Returns the class of a normalization of each head: a rank's gradient of its scale is a summand, of its own heads."""

    def scale(self: Any) -> Any:
        weight = vars(self)["scale"]
        if regions.tensor_program() is None:
            return weight
        return regions.copy_to(tf.convert_to_tensor(weight), f"{self.name}/scale")

    return type(norm_class.__name__, (norm_class,), {"scale": property(scale), "__module__": norm_class.__module__})


def _of_this_rank(name: str, made: HeadedLayer) -> property:
    """Returns the property that an attribute becomes: inside a replica the number of the rank's own heads."""

    def number(self: Any) -> int:
        program = regions.tensor_program()
        if program is None:
            return vars(self)[name]
        ranks = program.mesh.tensor_parallel_size
        queries, keys_values = number_of_heads(self, made)
        if name == made.key_value_heads:
            return max(1, keys_values // ranks)
        if name == made.groups:
            return (queries // ranks) // max(1, keys_values // ranks)
        return vars(self)[name] // ranks

    return property(number)


@functools.cache
def parallel_class(made: HeadedLayer) -> type:
    """Returns the mixin that spreads the heads of such a layer over the tensor ranks."""
    # A MultiHeadAttention does not look at its number of heads when it computes.
    counts = [
        name for name in (made.query_heads, made.key_value_heads, made.groups, *made.sizes) if name and name != "_num_heads"
    ]
    body = {"_made": made, "__module__": __name__, **{name: _of_this_rank(name, made) for name in counts}}
    return type(f"Parallel{made.class_name}", (_ParallelHubAttention,), body)
