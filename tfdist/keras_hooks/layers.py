"""Layers: whose they are; on a part of the batch, normalization, random numbers, convolutions and poolings, and losses of sharded
outputs."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives import rank_program
from tfdist.keras_hooks.table import BACKEND_NN, replaces
from tfdist.keras_layers import empty_batches, layer_strategy, normalization, randomness, recurrent_states
from tfdist.placements.telling import calling, of_layer
from tfdist.sharding import config_of, read_if_sharded
from tfdist.sharding.recomputation import Recomputation
from tfdist.sharding.sharded_activations import WHOLE


@replaces("keras.layers.Layer", "_maybe_build")
def _maybe_build(original: Callable[..., None], self: Any, call_spec: Any) -> None:
    """A layer that is put after layers of a strategy belongs to it, also outside `scope()`, where Keras makes plain weights."""
    if self.built:
        return
    with layer_strategy.scope_of(layer_strategy.layers_before(call_spec.arguments_dict)):
        original(self, call_spec)


@replaces("keras.layers.Layer", "__call__", signature="(self, *args, **kwargs)")
def _layer_call(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Rows of the batch that meet in a layer are those of all ranks."""
    return of_layer(self, functools.partial(original, self), args, kwargs)


@replaces("keras.layers.BatchNormalization", "_moments")
def _moments(original: Callable[..., Any], self: Any, inputs: tf.Tensor, mask: tf.Tensor | None) -> Any:
    """The statistics must be those of the global batch (`synchronized=True`), also under a mask and where a rank has no rows, and
    say how much they weigh."""
    return normalization.moments(self, inputs, mask, lambda inputs, mask: original(self, inputs, mask))


@replaces("keras.layers.RNN", "call", signature="(self, sequences, initial_state=None, mask=None, training=False)")
def _recurrent_call(original: Callable[..., Any], self: Any, sequences: Any, *args: Any, **kwargs: Any) -> Any:
    """A stateful layer's fixed batch size is that of the global batch, of which a rank has a part."""
    return original(self, recurrent_states.deal_out(self, sequences), *args, **kwargs)


@replaces("keras.random.SeedGenerator", "next")
def _next(original: Callable[..., Any], self: Any, ordered: bool = True) -> Any:
    """All ranks would draw the same numbers from the one state: the same dropout mask, each for its part of the batch."""
    randomness.settle(self)
    return randomness.of_this_rank(original(self, ordered))


@replaces("keras.src.backend.tensorflow.core", "remat")
def _remat(original: Callable[..., Any], f: Callable[..., Any]) -> Callable[..., Any]:
    """TensorFlow's `recompute_grad` takes no keyword arguments while it traces, which layers have, calls the function again,
    which draws and counts again, and knows no variable of which a rank has a shard."""
    kept = original(f)

    def call(*args: Any, **kwargs: Any) -> Any:
        program = rank_program()
        if program is not None:
            return program.part(Recomputation).call(f, args, kwargs)
        return (f if _is_sharded(f) else kept)(*args, **kwargs)

    return functools.update_wrapper(call, f, updated=())


def _is_sharded(function: Any) -> bool:
    """Whether a function is called in the scope of a tfdist strategy, or is a layer (or a method of one) that was made in it."""
    strategies = (tf.distribute.get_strategy(), layer_strategy.strategy_of(getattr(function, "__self__", function)))
    return any(config_of(strategy) is not None for strategy in strategies)


_CONV = "strides=1, padding='valid', data_format=None, dilation_rate=1)"
_TRANSPOSED = "(inputs, kernel, strides=1, padding='valid', output_padding=None, data_format=None, dilation_rate=1)"
_POOL = "(inputs, pool_size, strides=None, padding='valid', data_format=None)"


@replaces(BACKEND_NN, "conv", signature=f"(inputs, kernel, {_CONV}")
@replaces(BACKEND_NN, "depthwise_conv", signature=f"(inputs, kernel, {_CONV}")
@replaces(BACKEND_NN, "separable_conv", signature=f"(inputs, depthwise_kernel, pointwise_kernel, {_CONV}")
@replaces(BACKEND_NN, "conv_transpose", signature=_TRANSPOSED)
@replaces(BACKEND_NN, "max_pool", signature=_POOL)
@replaces(BACKEND_NN, "average_pool", signature=_POOL)
def _fed_with_rows(original: Callable[..., tf.Tensor], inputs: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
    """A rank's piece of the batch may be empty, and TensorFlow's kernel on CPUs fails on no rows. Keras compiles some
    convolutions by XLA, which cannot put a sharded kernel together: it is read before."""
    args, kwargs = tuple(map(read_if_sharded, args)), {name: read_if_sharded(value) for name, value in kwargs.items()}
    if inputs.shape[0] or rank_program(peers_on="data") is None:
        return original(inputs, *args, **kwargs)
    return empty_batches.fed_with_rows(original, inputs, *args, **kwargs)


@replaces("keras.losses.Loss", "__call__")
def _call(original: Callable[..., Any], self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """A loss must see whole predictions, also of a layer that leaves its output sharded over the tensor axis."""
    y_pred = y_pred if getattr(self, "_takes_sharded_predictions", False) else WHOLE.now.all_whole(y_pred)
    with calling(self):
        return original(self, y_true, y_pred, sample_weight)
