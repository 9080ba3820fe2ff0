"""The layers that can be sharded, in which roles, and which sizes the number of tensor ranks must divide.

The class of `tfdist.layers` that a layer becomes in a role tells along which axes its weights are sharded.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.extensions import tensor
from tfdist.extensions.tensor.einsum_axes import COLUMN, ROW, einsum_label, sharded_axes
from tfdist.extensions.tensor.headed_layers import GROUPED_QUERY, MULTI_HEAD, HeadedLayer, computes_as, headed_layer
from tfdist.extensions.tensor.parallel_attention import parallel_class
from tfdist.extensions.tensor.sharded_weights import ShardedWeights

VOCAB, REPLICATE = "vocab", "replicate"
ROLES = (COLUMN, ROW, VOCAB, REPLICATE)


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """A Keras class whose layers can be sharded.

    Attributes:
        layer_class: the class; a subclass counts if it keeps the class's `call`.
        parallel: the class of `tfdist.layers`, or the mixin, that shards it, by role.
        heads: how an attention is made; None for all else.
    """

    layer_class: type
    parallel: Mapping[str, Any]
    heads: HeadedLayer | None = None

    @property
    def name(self) -> str:
        """The name of the Keras class, by which plans know the layer."""
        return "GroupQueryAttention" if self.layer_class is keras.layers.GroupQueryAttention else self.layer_class.__name__

    @property
    def is_attention(self) -> bool:
        """Whether the layer has heads."""
        return self.heads is not None

    @property
    def is_normalization(self) -> bool:
        """Whether its layers are sharded only with the channels that they get."""
        return self.layer_class is keras.layers.BatchNormalization

    @property
    def returns_more(self) -> bool:
        """Whether a call returns more than the output, whatever it is asked for."""
        return self.heads is not None and self.heads.bias is not None


KINDS = (
    LayerKind(keras.layers.Dense, {COLUMN: tensor.ColumnParallelDense, ROW: tensor.RowParallelDense}),
    LayerKind(keras.layers.EinsumDense, {COLUMN: tensor.ColumnParallelEinsumDense, ROW: tensor.RowParallelEinsumDense}),
    LayerKind(keras.layers.Conv2D, {COLUMN: tensor.ColumnParallelConv2D, ROW: tensor.RowParallelConv2D}),
    LayerKind(keras.layers.BatchNormalization, {COLUMN: tensor.ChannelParallelBatchNormalization}),
    LayerKind(keras.layers.ReversibleEmbedding, {VOCAB: tensor.VocabParallelReversibleEmbedding}),  # before its base
    LayerKind(keras.layers.Embedding, {VOCAB: tensor.VocabParallelEmbedding}),
    LayerKind(keras.layers.MultiHeadAttention, {COLUMN: tensor.ParallelMultiHeadAttention}, MULTI_HEAD),
    LayerKind(keras.layers.GroupQueryAttention, {COLUMN: tensor.ParallelGroupedQueryAttention}, GROUPED_QUERY),
)
# Each step of these calls the layers inside once more, or replaces their weights: no collective may stand there.
LOOPS = (keras.layers.RNN, keras.layers.Bidirectional, keras.layers.TimeDistributed, keras.layers.SpectralNormalization)


def kind_of(layer: keras.Layer) -> LayerKind | None:
    """Returns the kind of a layer that can be sharded; None for every other: one that computes in another way, or is sharded
    already."""
    if isinstance(layer, ShardedWeights):
        return None
    if (found := headed_layer(layer)) is not None:
        return LayerKind(found[1], {COLUMN: parallel_class(found[0])}, heads=found[0])
    kind = next((kind for kind in KINDS if isinstance(layer, kind.layer_class)), None)
    return kind if kind is not None and computes_as(layer, kind.layer_class) else None


def is_attention(layer: keras.Layer) -> bool:
    """Returns whether a layer is an attention that can be sharded, by its heads."""
    kind = kind_of(layer)
    return kind is not None and kind.is_attention


def path_of(layer: keras.Layer) -> str:
    """Returns the layer's path in its model, such as "encoder/dense_1"; its name where Keras gives it none."""
    return layer.path or layer.name


def obstacle(layer: keras.Layer) -> str | None:
    """Returns why a built layer of a kind that can be sharded cannot be, as it is; None if nothing is in the way."""
    activation = getattr(layer, "activation", None)
    heads = kind_of(layer).heads
    reasons = {
        "it is quantized": getattr(layer, "quantization_mode", None) is not None,
        "its channels are in groups": getattr(layer, "groups", 1) != 1,
        "it renormalizes batches": getattr(layer, "renorm", False),
        "its activation has weights": isinstance(activation, keras.Layer) and activation.weights,
        "its activity regularizer would see a part of the heads only": heads and heads.activity_regularizer_of(layer),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def roles_of(layer: keras.Layer) -> tuple[str, ...]:
    """Returns the roles in which this layer can be sharded: those of its kind, less those that its equation has no label for."""
    kind = kind_of(layer)
    if kind is None:
        return ()
    if kind.layer_class is keras.layers.EinsumDense:
        return tuple(role for role in kind.parallel if einsum_label(layer, role) is not None)
    return tuple(kind.parallel)


def sharded_sizes(layer: keras.Layer, role: str, ranks: int = 1) -> dict[str, int]:
    """Returns the sizes, by name, that the number of ranks must divide. Embedding: none, its rows are padded.

    Heads of keys and values may be fewer than `ranks`, if they divide them.
    """
    kind = kind_of(layer)
    if kind.heads is not None:
        return kind.heads.sizes_of(layer, ranks)
    if role == VOCAB:
        return {}
    if kind.is_normalization:
        return {"channels": layer.moving_mean.shape[0]}
    size = layer._kernel.shape[sharded_axes(layer, role).kernel]
    if kind.layer_class is keras.layers.EinsumDense:
        return {f"axis {einsum_label(layer, role)!r} of {layer.equation!r}": size}
    names = ("units", "input features") if kind.layer_class is keras.layers.Dense else ("filters", "input channels")
    return {names[role == ROW]: size}


def sharded_weights(layer: keras.Layer, role: str, ranks: int = 1) -> list[tuple[keras.Variable, int | None]]:
    """Returns every weight of the layer with the axis along which `role` shards it, None if it stays whole."""
    axes = {id(weight): placement.axis for weight, placement in kind_of(layer).parallel[role].shards_of(layer, ranks)}
    return [(weight, axes.get(id(weight))) for weight in layer.weights]


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
