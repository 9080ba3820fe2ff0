"""What tensor-parallel layers have in common: weights that are sharded, and what cannot be done with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.layers import regions
from tfdist.layers.checkpoint_names import save_as
from tfdist.layers.layer_strategy import scope_of
from tfdist.layers.lora_factors import FactoredWeight
from tfdist.runtime import begin_use
from tfdist.sharding import Shard, request_placement

_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


# The Keras layer that it is mixed into: the type checker is not to ask what that has.
_Layer: Any = object


class ShardedWeights(_Layer):
    """A mixin for Keras layers whose weights may be sharded over the tensor axis; before the Keras class.

    A subclass says in `_shards` which; they are sharded when the layer has been built, in the scope of a strategy with a tensor
    axis. Where LoRA may be enabled on the layer, it names the weight and its factors in `_factored`.
    """

    _factored: FactoredWeight | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        whole = next(
            (base for base in cls.__mro__ if issubclass(base, keras.Layer) and not issubclass(base, ShardedWeights)), None
        )
        if whole is not None:
            save_as(cls, whole)

    def _shards(self) -> Mapping[str, Shard]:
        """Returns, by the attribute that holds it, how each weight is sharded; what is not named stays whole."""
        raise NotImplementedError

    def build(self, input_shape: Any) -> None:
        self.check_may_be_sharded(input_shape)
        super().build(input_shape)
        self.shard_weights()

    def check_may_be_sharded(self, input_shape: Any) -> None:
        """Raises what the layer raises that cannot be sharded in as many parts as the strategy has tensor ranks."""
        if getattr(self, "quantization_mode", None):
            self._refuse("Quantization")
        self._check_sizes(input_shape, regions.scope_tensor_size())

    def shard_weights(self) -> None:
        """Shards the weights of the layer, which is built."""
        begin_use()  # in a file they stand under the name of the whole layer, also without a strategy
        self._shard(self._shards())
        if getattr(self, "lora_enabled", False):
            self._shard(self._factor_shards())

    def _shard(self, placements: Mapping[str, Shard]) -> None:
        for name, placement in placements.items():
            variable = getattr(self, name, None)
            if variable is not None:
                shard_weight(variable, placement)

    def _factor_shards(self) -> Mapping[str, Shard]:
        return self._factored.shards(self, self._shards()[self._factored.weight])

    def _check_sizes(self, input_shape: Any, parts: int) -> None:
        """Raises ValueError when the layer cannot be sharded in `parts`."""

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        if self._factored is None:
            self._refuse("LoRA")
        with scope_of(self):
            super().enable_lora(*args, **kwargs)
            self._shard(self._factor_shards())

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("Quantization")

    def _refuse(self, what: str) -> None:
        raise errors.not_implemented(
            f"{what} of a tensor-parallel layer is not supported.",
            layer=self.name,
            fix=f"Use the Keras layer that {type(self).__name__} is made of.",
        )


def shard_weight(variable: keras.Variable, placement: Shard) -> None:
    """Shards a layer's weight over the tensor axis, if the strategy has one, and lets its regularizer see all of it.

    Raises:
        ValueError: the axis does not exist, or the tensor size does not divide its length and `placement` is not padded.
    """
    if regions.scope_tensor_size() == 1:
        return
    request_placement(variable, tensor=placement)
    if variable.regularizer is not None:
        variable.regularizer = WholeRegularizer(variable.regularizer, placement.axis, variable.shape)


class WholeRegularizer:
    """A regularizer of a weight that is sharded: inside a replica it sees all ranks' parts."""

    def __init__(self, regularizer: Callable[..., Any], axis: int, shape: tuple[int, ...]):
        self._regularizer = regularizer
        self._axis = axis
        self._shape = tuple(shape)

    def __call__(self, weight: Any) -> tf.Tensor:
        if regions.tensor_program() is None:
            return self._regularizer(weight)
        local = tf.convert_to_tensor(weight)
        if isinstance(self._regularizer, _SUMS):
            return regions.reduce_from(self._regularizer(local), "regularizer")
        whole = regions.gather_from(local, self._axis, "regularizer")
        return self._regularizer(whole[tuple(slice(0, size) for size in self._shape)])


def local(variable: Any) -> tf.Tensor:
    """Returns what this rank computes with of a weight, a tensor of its own shape.

    Keras's operations look at the shape of what they are given (`add` may become a `BiasAdd`), and a Keras variable's is global.
    """
    return tf.convert_to_tensor(variable)


def check_divisible(argument: str, size: int, parts: int, layer: str) -> None:
    """Raises ValueError, with the nearest sizes that work, when `parts` does not divide `size`."""
    if size % parts:
        lower = size // parts * parts
        raise errors.value_error(
            f"`{argument}` of layer {layer!r} is sharded equally over the tensor ranks, but {parts} does not divide {size}.",
            fix=f"The nearest sizes that work: {f'{lower}, ' if lower else ''}{lower + parts}.",
            **{argument: size, "tensor_parallel_size": parts},
        )


def check_is_sharded(layer: Any, variable: keras.Variable) -> None:
    """Raises RuntimeError when `layer`, which computes its part here, has a weight that is whole."""
    layout = getattr(variable._value, "layout", None)  # None: made outside
    if layout is not None and layout.is_tensor_sharded:
        return
    raise errors.runtime_error(
        f"Layer {layer.name!r} was built outside the `scope()` of the strategy that runs it: its weights are not sharded.",
        fix="Build the model, and with it the layer, inside `strategy.scope()`.",
    )
