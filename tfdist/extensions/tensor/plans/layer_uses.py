"""How much goes through a layer each time the model calls it: what the traffic of a sharded is computed from."""

import dataclasses
import math
from collections.abc import Sequence

import keras

from tfdist.extensions.tensor.einsum_axes import einsum_terms
from tfdist.extensions.tensor.plans.keras_tracing import Event, Trace
from tfdist.extensions.tensor.plans.layer_kinds import kind_of


@dataclasses.dataclass(frozen=True)
class LayerUse:
    """One call of a layer, in elements per example of the batch.

    Attributes:
        gradient_elements: of the inputs that a gradient flows back to, unlike the model's own inputs; a tensor that is given
            twice, as in self-attention, counts once.
        output_elements: of the output.
        vectors: those that the call transforms: 1, or the positions of a sequence.
    """

    gradient_elements: float
    output_elements: float
    vectors: float


def seen_use(event: Event, trace: Trace) -> LayerUse:
    """Returns the use of a layer in a call that was followed."""
    batch = trace.batch_size
    # A bias of an attention's scores, (batch, heads, target, source), stays with the heads.
    entering = [x for x in event.inputs if len(x.shape) < 4 or not kind_of(event.operation).returns_more]
    is_reverse = keras.backend.is_float_dtype(event.inputs[0].dtype)
    return LayerUse(
        gradient_elements=_elements([x for x in entering if x in trace.needs_gradient]) / batch,
        output_elements=_elements(event.outputs[:1]) / batch,
        vectors=_vectors(event.operation, event.inputs[0].shape, is_reverse) / batch,
    )


def hidden_use(layer: keras.Layer, trace: Trace) -> LayerUse:
    """Returns the use of a layer in a call that was not: sizes that are not known there count as 1."""
    batch, (given, returned) = trace.batch_size, trace.hidden[layer]
    return LayerUse(_size(given) / batch, _size(returned) / batch, _vectors(layer, given) / batch)


def _vectors(layer: keras.Layer, shape: Sequence[int | None], is_reverse: bool = False) -> float:
    if isinstance(layer, keras.layers.Embedding) and not is_reverse:
        return _size(shape)
    if isinstance(layer, keras.layers.EinsumDense):
        inputs, kernel, outputs = einsum_terms(layer)
        sizes = zip(kernel, layer.kernel.shape, strict=True)
        return _size(shape) / math.prod(size for label, size in sizes if label in inputs and label not in outputs)
    features = 1 if getattr(layer, "data_format", None) == "channels_first" else -1
    return _size(shape) / (shape[features] or 1)


def _elements(tensors: Sequence[keras.KerasTensor]) -> int:
    return sum(_size(x.shape) for x in tensors)


def _size(shape: Sequence[int | None]) -> int:
    return math.prod(size or 1 for size in shape)
