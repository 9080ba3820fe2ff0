"""Common code of tensor-parallel layers: weights that are sharded, and the refusal of uses that they do not bear."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.extensions.tensor import regions
from tfdist.extensions.tensor.lora_factors import FactoredWeight
from tfdist.keras_layers.checkpoint_names import save_as
from tfdist.keras_layers.layer_strategy import scope_of
from tfdist.runtime import begin_use
from tfdist.sharding import Shard, request_placement

_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


# The Keras layer that it is mixed into: the type checker is not to ask what that has.
_Layer: Any = object


class ShardedWeights(_Layer):
    """A mixin for Keras layers whose weights may be sharded over the tensor axis; before the Keras class.

    They are sharded when the layer has been built, in the scope of a strategy with a tensor axis. Where LoRA may be enabled on
    the layer, a subclass names the weight and its factors in `_factored`.
    """

    _factored: FactoredWeight | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        whole = next(
            (base for base in cls.__mro__ if issubclass(base, keras.Layer) and not issubclass(base, ShardedWeights)), None
        )
        if whole is not None:
            save_as(cls, whole)

    @classmethod
    def _shards(cls, layer: Any) -> dict[str, Shard]:
        """Returns, by the attribute that holds it, how each weight of `layer`, sharded or not yet, is; others stay whole."""
        raise NotImplementedError

    @classmethod
    def _factor_shards(cls, layer: Any) -> dict[str, Shard]:
        return cls._factored.shards(layer, cls._shards(layer)[cls._factored.weight])

    @classmethod
    def shards_of(cls, layer: Any, ranks: int) -> list[tuple[keras.Variable, Shard]]:
        """Returns the weights of a built layer, sharded or not yet, that this class shards over `ranks`, and how."""
        shards = cls._shards(layer)
        if getattr(layer, "lora_enabled", False):
            shards |= cls._factor_shards(layer)
        return _named(layer, shards)

    def build(self, input_shape: Any, *more_shapes: Any) -> None:
        if getattr(self, "quantization_mode", None):
            self._refuse("Quantization")
        self._check_sizes(input_shape, regions.scope_tensor_size())
        super().build(input_shape, *more_shapes)
        self.shard_weights()

    def shard_weights(self) -> None:
        """Shards the weights of the layer, which is built."""
        begin_use()  # in a file they stand under the name of the whole layer, also without a strategy
        shard_variables(self.shards_of(self, regions.scope_tensor_size()))

    def _check_sizes(self, input_shape: Any, parts: int) -> None:
        """Raises ValueError when the layer cannot be sharded in `parts`."""

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        if self._factored is None:
            self._refuse("LoRA")
        with scope_of([self]):
            super().enable_lora(*args, **kwargs)
            shard_variables(_named(self, self._factor_shards(self)))

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("Quantization")

    def _refuse(self, what: str) -> None:
        raise errors.not_implemented(
            f"{what} of a tensor-parallel layer is not supported.",
            layer=self.name,
            fix=f"Use the Keras layer that {type(self).__name__} is made of.",
        )


def _named(layer: Any, shards: dict[str, Shard]) -> list[tuple[keras.Variable, Shard]]:
    named = [(getattr(layer, name, None), shard) for name, shard in shards.items()]
    return [(variable, shard) for variable, shard in named if variable is not None]


def shard_variables(placements: list[tuple[keras.Variable, Shard]]) -> None:
    """Shards weights over the tensor axis, if the strategy has one, and lets their regularizers see all of them."""
    if regions.scope_tensor_size() == 1:
        return
    for variable, placement in placements:
        request_placement(variable, tensor=placement)
        if variable.regularizer is not None:
            variable.regularizer = _of_whole(variable.regularizer, placement.axis, tuple(variable.shape))


def _of_whole(regularizer: Callable[..., Any], axis: int, shape: tuple[int, ...]) -> Callable[[Any], tf.Tensor]:
    """Returns a regularizer of a weight that is sharded: inside a replica it sees all ranks' parts."""

    def regularize(weight: Any) -> tf.Tensor:
        if regions.tensor_program() is None:
            return regularizer(weight)
        local = tf.convert_to_tensor(weight)
        if isinstance(regularizer, _SUMS):
            return regions.reduce_from(regularizer(local), "regularizer")
        whole = regions.gather_from(local, axis, "regularizer")
        return regularizer(whole[tuple(slice(0, size) for size in shape)])

    return regularize


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
