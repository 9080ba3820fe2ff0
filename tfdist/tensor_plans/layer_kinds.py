"""The layers that can be sharded: in which roles, along which axes, and which sizes a sharded must divide.

| kind | role | sharded axis of the weights | input | output |
|---|---|---|---|---|
| Dense | column | kernel 1, bias 0 | whole | local on the last axis |
| Dense | row | kernel 0 | local on the last axis | whole |
| EinsumDense | column | the first label of the kernel that is in the output only | whole | local on that label |
| EinsumDense | row | the first label of the kernel that is contracted | local on that label | whole |
| Embedding | vocab | rows of the table | whole | whole |
| MultiHeadAttention, GroupQueryAttention | column | heads: projections by column, output projection by row | whole | whole |
"""

from __future__ import annotations

import dataclasses
import math

import keras
import tensorflow as tf

from tfdist.layers.einsum_axes import COLUMN, ROW, einsum_label, sharded_axes
from tfdist.layers.sharded_weights import ShardedWeights

VOCAB, REPLICATE = "vocab", "replicate"
ROLES = (COLUMN, ROW, VOCAB, REPLICATE)


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """A Keras class whose layers can be sharded.

    Attributes:
        layer_class: the class; a subclass counts if it keeps the class's `call`.
        roles: the ways it can be sharded.
    """

    layer_class: type
    roles: tuple[str, ...]

    @property
    def name(self) -> str:
        return "GroupQueryAttention" if self.layer_class is keras.layers.GroupQueryAttention else self.layer_class.__name__

    @property
    def is_attention(self) -> bool:
        return self.layer_class in (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


KINDS = (
    LayerKind(keras.layers.Dense, (COLUMN, ROW)),
    LayerKind(keras.layers.EinsumDense, (COLUMN, ROW)),
    LayerKind(keras.layers.Embedding, (VOCAB,)),
    LayerKind(keras.layers.MultiHeadAttention, (COLUMN,)),
    LayerKind(keras.layers.GroupQueryAttention, (COLUMN,)),
)
# Each step of these calls the layers inside once more, or replaces their weights: no collective may stand there.
LOOPS = (keras.layers.RNN, keras.layers.Bidirectional, keras.layers.TimeDistributed, keras.layers.SpectralNormalization)
# The methods that a subclass may not replace: the sharded layer takes their place.
_METHODS = ("call", "_compute_attention", "_masked_softmax")


def kind_of(layer: keras.Layer) -> LayerKind | None:
    """Returns the kind of a layer that can be sharded; None for every other: one that computes in another way, or is sharded
    already."""
    if isinstance(layer, ShardedWeights):
        return None
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
    if getattr(layer, "lora_enabled", False):
        return "LoRA is enabled on it"
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


def sharded_sizes(layer: keras.Layer, role: str) -> dict[str, int]:
    """Returns the sizes, by name, that the number of ranks must divide. Embedding: none, its rows are padded."""
    kind = kind_of(layer)
    if role == VOCAB:
        return {}
    if kind.layer_class is keras.layers.MultiHeadAttention:
        return {"num_heads": layer.num_heads}
    if kind.layer_class is keras.layers.GroupQueryAttention:
        return {"num_query_heads": layer.num_query_heads, "num_key_value_heads": layer.num_key_value_heads}
    size = layer.kernel.shape[sharded_axes(layer, role).kernel]
    if kind.layer_class is keras.layers.Dense:
        return {"units" if role == COLUMN else "input features": size}
    return {f"axis {einsum_label(layer, role)!r} of {layer.equation!r}": size}


def sharded_weights(layer: keras.Layer, role: str) -> list[tuple[keras.Variable, int | None]]:
    """Returns every weight of the layer with the axis along which `role` shards it, None if it stays whole."""
    kind = kind_of(layer)
    if role == VOCAB:
        return [(weight, 0 if weight is layer.embeddings else None) for weight in layer.weights]
    if kind.is_attention:
        return [(weight, _attention_axis(weight)) for weight in layer.weights]
    axes = sharded_axes(layer, role)
    return [(weight, axes.kernel if weight is layer.kernel else axes.bias) for weight in layer.weights]


def saved_bytes(layer: keras.Layer, role: str, tensor_parallel_size: int) -> int:
    """Returns the parameter bytes that a rank no longer holds, as stored; the rows of a table are padded to equal parts."""
    saved = 0
    for weight, axis in sharded_weights(layer, role) if role != REPLICATE else ():
        if axis is not None:
            size = weight.shape[axis]
            saved += (size - -(-size // tensor_parallel_size)) * (math.prod(weight.shape) // size) * dtype_bytes(weight.dtype)
    return saved


def dtype_bytes(dtype: str) -> int:
    """Returns the bytes of one element of a Keras dtype such as "float32"."""
    return tf.as_dtype(dtype).size


def _attention_axis(weight: keras.Variable) -> int | None:
    """Heads are axis 1 of a projection's kernel (features, heads, size), 0 of its bias and of the output projection's kernel."""
    projection, name = weight.path.split("/")[-2:]
    if projection == "attention_output":
        return 0 if name == "kernel" else None
    return 1 if name == "kernel" else 0
