"""Attentions whose heads can be spread over the tensor ranks, Keras's own and KerasHub's: what each calls its parts.

KerasHub is not imported: classes are known by name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras


@dataclasses.dataclass(frozen=True)
class HeadedLayer:
    """How an attention class is made, by the names of its attributes and of its call's arguments.

    Attributes:
        class_name: the class.
        inputs: the arguments that are projected.
        queries: the projection of the queries, and others to as many heads, where the layer has them.
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
    queries: tuple[str, ...]
    keys_values: tuple[str, str]
    outputs: str
    query_heads: str
    key_value_heads: str | None = None
    groups: str | None = None
    sizes: tuple[str, ...] = ()
    per_head: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    bias: str | None = None
    norms: tuple[str, ...] = ()

    def heads_of(self, layer: keras.Layer) -> tuple[int, int]:
        """Returns the numbers of query heads, and of heads of keys and values, outside replicas."""
        queries = vars(layer)[self.query_heads]
        return queries, vars(layer)[self.key_value_heads] if self.key_value_heads else queries

    def sizes_of(self, layer: keras.Layer, ranks: int) -> dict[str, int]:
        """Returns the numbers of heads, by name, that `ranks` must divide."""
        queries, keys_values = self.heads_of(layer)
        sizes = {self.query_heads.lstrip("_"): queries}
        if self.key_value_heads and not are_shared(keys_values, ranks):
            sizes[self.key_value_heads.lstrip("_")] = keys_values
        return sizes

    def activity_regularizer_of(self, layer: keras.Layer) -> Any | None:
        """Returns what regularizes the outputs of the layer's projections, to which Keras hands it on."""
        return getattr(layer, "_activity_regularizer", None) or layer.activity_regularizer


def are_shared(heads: int, ranks: int) -> bool:
    """Whether there are fewer heads of keys and values than ranks, so that each is shared by equally many."""
    return heads < ranks and ranks % heads == 0


_KERAS: dict[str, Any] = {
    "inputs": ("query", "value", "key"),
    "queries": ("_query_dense", "_gate_dense"),
    "keys_values": ("_key_dense", "_value_dense"),
    "outputs": "_output_dense",
}
_HEADS: dict[str, Any] = {"query_heads": "num_query_heads", "key_value_heads": "num_key_value_heads"}
_GROUPED: dict[str, Any] = {**_KERAS, **_HEADS, "inputs": ("hidden_states",), "groups": "num_key_value_groups"}
_UNDERSCORED: dict[str, Any] = {name: f"_{_GROUPED[name]}" for name in ("query_heads", "key_value_heads", "groups")}
_PLAIN: dict[str, Any] = {"queries": ("query_dense",), "keys_values": ("key_dense", "value_dense"), "outputs": "output_dense"}
_GEMMA: dict[str, Any] = {
    **_GROUPED,
    **_PLAIN,
    "inputs": ("x",),
    "sizes": ("hidden_dim",),  # only ever divided by the number of query heads
}

MULTI_HEAD = HeadedLayer("MultiHeadAttention", **_KERAS, query_heads="_num_heads")
GROUPED_QUERY = HeadedLayer("GroupedQueryAttention", **_KERAS, **_HEADS, groups="num_repeats")
_OF_KERAS_HUB = (
    HeadedLayer("CachedMultiHeadAttention", **_KERAS, query_heads="_num_heads"),
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
        queries=("query_projector",),
        keys_values=("key_projector", "value_projector"),
        outputs="output_projector",
        query_heads="num_heads",
        sizes=("inner_dim",),
        per_head={"relative_attention_bias": 1},
        bias="position_bias",
    ),
)
_BY_NAME = {made.class_name: made for made in _OF_KERAS_HUB}
# The methods that a subclass of a class that can be sharded may not replace: they compute what is divided.
_METHODS = ("call", "_compute_attention", "_masked_softmax", "compute_bias", "_mask_sliding_window", "convolution_op", "_moments")


def computes_as(layer: keras.Layer, base: type) -> bool:
    """Whether a layer of a subclass of `base` computes as `base` does."""
    return all(getattr(type(layer), name, None) is getattr(base, name, None) for name in _METHODS)


def headed_layer(layer: keras.Layer) -> tuple[HeadedLayer, type] | None:
    """Returns how a KerasHub attention is made, and the class that tells; None for other layers, and for subclasses that compute
    in another way."""
    for base in type(layer).__mro__:
        if base.__module__.startswith("keras_hub.") and base.__name__ in _BY_NAME:
            return (_BY_NAME[base.__name__], base) if computes_as(layer, base) else None
    return None
