"""The strategy that a layer belongs to: found where its weights are made outside `strategy.scope()`, and so given to them.

    with strategy.scope():
        model = build_model()
    model.get_layer("hidden").enable_lora(4)            the layer's other weights have a strategy
    model.add(keras.layers.Dense(3))                    the model that is being built has one
    outputs = keras.layers.Dense(3)(model.output)       the layers that its inputs come from have one
    keras.Model(model.input, outputs).compile(...)      all weights of its layers have the same one

Where a scope is open, that of no tfdist strategy too, it counts alone.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.sharding import config_of
from tfdist.sharding.separate_thread import made_by

# Of layers whose weights were made under a strategy: `quantize` takes the last one away, and makes others.
_of_layers: weakref.WeakKeyDictionary[Any, tf.distribute.Strategy] = weakref.WeakKeyDictionary()


def note_made(layers: Iterable[Any]) -> None:
    """Notes that a weight of the first of `layers`, if there is one, has been made in the scope that is open."""
    layer = next(iter(layers), None)
    if isinstance(layer, keras.layers.Layer) and config_of(tf.distribute.get_strategy()) is not None:
        _of_layers[layer] = tf.distribute.get_strategy()


def scope_of(layers: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Returns the scope of the strategy of the first of `layers` that has one; none, if none has one, or a scope is open."""
    if tf.distribute.has_strategy():
        return contextlib.nullcontext()
    strategy = next((found for layer in layers if (found := strategy_of(layer)) is not None), None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def layers_before(inputs: Any) -> Iterator[keras.layers.Layer]:
    """Yields the layers that symbolic `inputs`, a structure, come from, the nearest first."""
    tensors = [tensor for tensor in tf.nest.flatten(inputs) if isinstance(tensor, keras.KerasTensor)]
    seen: set[int] = set()
    while tensors:
        layer, node, _ = getattr(tensors.pop(0), "_keras_history", (None, 0, 0))
        if layer is None or id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        tensors.extend(layer._inbound_nodes[node].input_tensors if layer._inbound_nodes else [])


def strategy_of(layer: Any) -> tf.distribute.Strategy | None:
    """Returns the tfdist strategy that `layer`, or a layer within it, belongs to: of a model the one that it was made in."""
    made_in = getattr(layer, "_distribute_strategy", None)
    if config_of(made_in) is not None:
        return made_in
    if not isinstance(layer, keras.layers.Layer):
        return None
    if layer in _of_layers:
        return _of_layers[layer]
    return next((strategy for variable in layer.variables if config_of(strategy := made_by(variable)) is not None), None)


def only_strategy_of(layer: keras.layers.Layer) -> tf.distribute.Strategy | None:
    """Returns the tfdist strategy under which all weights of `layer` were made; None: there is none, or more than one."""
    strategies = {made_by(variable) for variable in layer.weights}
    strategy = strategies.pop() if len(strategies) == 1 else None
    return strategy if config_of(strategy) is not None else None
