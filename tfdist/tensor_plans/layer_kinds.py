"""The layers that can be sharded: in which roles, along which axes, and which sizes a sharded must divide.

| kind | role | sharded axis of the weights | input | output |
|---|---|---|---|---|
| Dense | column | kernel 1, bias 0 | whole | local on the last axis |
| Dense | row | kernel 0 | local on the last axis | whole |
| Conv2D | column | kernel 3, bias 0: the output channels | whole | local on the channels |
| Conv2D | row | kernel 2: the input channels | local on the channels | whole |
| BatchNormalization | column | all: the channels | local on the channels | local on the channels |
| EinsumDense | column | the first label of the kernel that is in the output only | whole | local on that label |
| EinsumDense | row | the first label of the kernel that is contracted | local on that label | whole |
| Embedding, ReversibleEmbedding | vocab | rows of the table | whole | whole |
| MultiHeadAttention, GroupQueryAttention, KerasHub's | column | heads: projections column, output row | whole | whole |
"""

from __future__ import annotations

import dataclasses
import math

import keras
import tensorflow as tf

from tfdist.layers.einsum_axes import COLUMN, ROW, einsum_label, sharded_axes
from tfdist.layers.lora_factors import KERNEL, TABLE, FactoredWeight
from tfdist.layers.parallel_hub_attention import HeadedLayer, headed_layer, number_of_heads
from tfdist.layers.sharded_weights import ShardedWeights
from tfdist.layers.shared_heads import are_shared
from tfdist.sharding import Shard

VOCAB, REPLICATE = "vocab", "replicate"
ROLES = (COLUMN, ROW, VOCAB, REPLICATE)


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """A Keras class whose layers can be sharded.

    Attributes:
        layer_class: the class; a subclass counts if it keeps the class's `call`.
        roles: the ways it can be sharded.
        heads: how an attention of KerasHub is made; None for all else.
    """

    layer_class: type
    roles: tuple[str, ...]
    heads: HeadedLayer | None = None

    @property
    def name(self) -> str:
        return "GroupQueryAttention" if self.layer_class is keras.layers.GroupQueryAttention else self.layer_class.__name__

    @property
    def is_attention(self) -> bool:
        return self.heads is not None or self.layer_class in (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)

    @property
    def is_normalization(self) -> bool:
        """Whether its layers are sharded only with the channels that they get."""
        return self.layer_class is keras.layers.BatchNormalization

    @property
    def returns_more(self) -> bool:
        """Whether a call returns more than the output, whatever it is asked for."""
        return self.heads is not None and self.heads.bias is not None


KINDS = (
    LayerKind(keras.layers.Dense, (COLUMN, ROW)),
    LayerKind(keras.layers.EinsumDense, (COLUMN, ROW)),
    LayerKind(keras.layers.Conv2D, (COLUMN, ROW)),
    LayerKind(keras.layers.BatchNormalization, (COLUMN,)),
    LayerKind(keras.layers.ReversibleEmbedding, (VOCAB,)),
    LayerKind(keras.layers.Embedding, (VOCAB,)),
    LayerKind(keras.layers.MultiHeadAttention, (COLUMN,)),
    LayerKind(keras.layers.GroupQueryAttention, (COLUMN,)),
)
# Each step of these calls the layers inside once more, or replaces their weights: no collective may stand there.
LOOPS = (keras.layers.RNN, keras.layers.Bidirectional, keras.layers.TimeDistributed, keras.layers.SpectralNormalization)
# The methods that a subclass may not replace: the sharded layer takes their place.
_METHODS = ("call", "_compute_attention", "_masked_softmax", "convolution_op", "_moments")


def kind_of(layer: keras.Layer) -> LayerKind | None:
    """Returns the kind of a layer that can be sharded; None for every other: one that computes in another way, or is sharded
    already."""
    if isinstance(layer, ShardedWeights):
        return None
    if (found := headed_layer(layer)) is not None:
        return LayerKind(found[1], (COLUMN,), heads=found[0])
    for kind in KINDS:
        if isinstance(layer, kind.layer_class):
            base = kind.layer_class
            own = all(getattr(type(layer), name, None) is getattr(base, name, None) for name in _METHODS)
            return kind if own else None
    return None


def is_attention(layer: keras.Layer) -> bool:
    """Returns whether a layer is an attention that can be sharded, by its heads."""
    kind = kind_of(layer)
    return kind is not None and kind.is_attention


def path_of(layer: keras.Layer) -> str:
    """Returns the layer's path in its model, such as "encoder/dense_1"; its name where Keras gives it none."""
    return layer.path or layer.name


def obstacle(layer: keras.Layer) -> str | None:
    """Returns why a layer of a kind that can be sharded cannot be, as it is; None if nothing is in the way."""
    if not layer.built:
        return "it is not built"
    if getattr(layer, "quantization_mode", None) is not None:
        return "it is quantized"
    if getattr(layer, "groups", 1) != 1:
        return "its channels are in groups"
    if getattr(layer, "renorm", False):
        return "it renormalizes batches"
    activation = getattr(layer, "activation", None)
    if isinstance(activation, keras.Layer) and activation.weights:
        return "its activation has weights"
    return None


def roles_of(layer: keras.Layer) -> tuple[str, ...]:
    """Returns the roles in which this layer can be sharded: those of its kind, less those that its equation has no label for."""
    kind = kind_of(layer)
    if kind is None:
        return ()
    if kind.layer_class is keras.layers.EinsumDense:
        return tuple(role for role in kind.roles if einsum_label(layer, role) is not None)
    return kind.roles


def sharded_sizes(layer: keras.Layer, role: str, ranks: int = 1) -> dict[str, int]:
    """Returns the sizes, by name, that the number of ranks must divide. Embedding: none, its rows are padded.

    Heads of keys and values may be fewer than `ranks`, if they divide them.
    """
    kind = kind_of(layer)
    if kind.heads is not None:
        queries, keys_values = number_of_heads(layer, kind.heads)
        sizes = {kind.heads.query_heads.lstrip("_"): queries}
        if kind.heads.key_value_heads and not are_shared(keys_values, ranks):
            sizes[kind.heads.key_value_heads.lstrip("_")] = keys_values
        return sizes
    if role == VOCAB:
        return {}
    if kind.layer_class is keras.layers.MultiHeadAttention:
        return {"num_heads": layer.num_heads}
    if kind.layer_class is keras.layers.GroupQueryAttention:
        sizes = {"num_query_heads": layer.num_query_heads, "num_key_value_heads": layer.num_key_value_heads}
        if are_shared(layer.num_key_value_heads, ranks):
            del sizes["num_key_value_heads"]
        return sizes
    if kind.is_normalization:
        return {"channels": layer.moving_mean.shape[0]}
    size = layer._kernel.shape[sharded_axes(layer, role).kernel]
    if kind.layer_class is keras.layers.Dense:
        return {"units" if role == COLUMN else "input features": size}
    if kind.layer_class is keras.layers.Conv2D:
        return {"filters" if role == COLUMN else "input channels": size}
    return {f"axis {einsum_label(layer, role)!r} of {layer.equation!r}": size}


def sharded_weights(layer: keras.Layer, role: str, ranks: int = 1) -> list[tuple[keras.Variable, int | None]]:
    """Returns every weight of the layer with the axis along which `role` shards it, None if it stays whole."""
    kind = kind_of(layer)
    if role == VOCAB:
        return _with_factors(layer, TABLE, {"_embeddings": 0, "reverse_embeddings": 1})
    if kind.heads is not None:
        return _of_heads(layer, kind.heads, ranks)
    if kind.is_attention:
        is_shared = are_shared(getattr(layer, "num_key_value_heads", ranks), ranks)
        return [(weight, _attention_axis(weight, is_shared)) for weight in layer.weights]
    if kind.is_normalization:
        return [(weight, 0) for weight in layer.weights]
    axes = sharded_axes(layer, role)
    return _with_factors(layer, KERNEL, {"_kernel": axes.kernel, "bias": axes.bias})


def saved_bytes(layer: keras.Layer, role: str, tensor_parallel_size: int) -> int:
    """Returns the parameter bytes that a rank no longer holds, as stored; the rows of a table are padded to equal parts."""
    saved = 0
    for weight, axis in sharded_weights(layer, role, tensor_parallel_size) if role != REPLICATE else ():
        if axis is not None:
            size = weight.shape[axis]
            saved += (size - -(-size // tensor_parallel_size)) * (math.prod(weight.shape) // size) * dtype_bytes(weight.dtype)
    return saved


def dtype_bytes(dtype: str) -> int:
    """Returns the bytes of one element of a Keras dtype such as "float32"."""
    return tf.as_dtype(dtype).size


def _attention_axis(weight: keras.Variable, shares_keys: bool) -> int | None:
    """Heads are axis 1 of a projection's kernel (features, heads, size), 0 of its bias and of the output projection's kernel."""
    projection, name = weight.path.split("/")[-2:]
    if shares_keys and projection in ("key", "value"):
        return None
    if name == "lora_kernel_b":  # the heads are not the last axis: LoRA's first factor has them
        return None
    name = name.replace("lora_kernel_a", "kernel")
    if projection == "attention_output":
        return 0 if name == "kernel" else None
    return 1 if name == "kernel" else 0


def _of_heads(layer: keras.Layer, made: HeadedLayer, ranks: int) -> list[tuple[keras.Variable, int | None]]:
    """Returns the weights of a KerasHub attention, each with the axis of its heads."""
    is_shared = are_shared(number_of_heads(layer, made)[1], ranks)
    axes: dict[int, int | None] = {id(getattr(layer, name)): axis for name, axis in made.per_head.items() if hasattr(layer, name)}
    for name in (made.queries, *made.keys_values, made.outputs):
        dense = getattr(layer, name)
        if not (is_shared and name in made.keys_values):
            axes |= {id(weight): axis for weight, axis in sharded_weights(dense, ROW if name == made.outputs else COLUMN)}
    return [(weight, axes.get(id(weight))) for weight in layer.weights]


def _with_factors(
    layer: keras.Layer, factored: FactoredWeight, axes: dict[str, int | None]
) -> list[tuple[keras.Variable, int | None]]:
    """Returns the weights of a layer, each with its axis of `axes`; LoRA's factors with theirs."""
    if getattr(layer, "lora_enabled", False):
        factors = factored.shards(layer, Shard(axes[factored.weight]))
        axes = axes | {name: placement.axis for name, placement in factors.items()}
    of = {id(getattr(layer, name, None)): axis for name, axis in axes.items()}
    return [(weight, of.get(id(weight))) for weight in layer.weights]
