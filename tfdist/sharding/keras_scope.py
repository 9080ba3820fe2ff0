"""Sharding's questions to Keras while variables are made and read. Private names: see tests/test_private_names.py."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import in_stateless_scope as in_stateless_scope
from keras.src.backend.common.symbolic_scope import SymbolicScope as SymbolicScope
from keras.src.backend.common.variables import get_autocast_scope
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR


def current_layer() -> Any | None:
    """Returns the Keras object (a layer, usually) that is being built or called, or None outside Keras.

    Keras opens a name scope with the layer as its `caller` around every `build`, `add_weight` and call.
    """
    return next(iter(callers()), None)


def callers() -> list[Any]:
    """Returns the Keras objects (layers, usually) that are being built or called here, the innermost first."""
    stack = global_state.get_global_attribute("name_scope_stack") or []
    return [scope.caller for scope in reversed(stack)]


def is_in_compiled_loss() -> bool:
    """Whether Keras calls a loss here that was given to `compile`."""
    stack = global_state.get_global_attribute("name_scope_stack") or []
    return any(scope.name == "compile_loss" for scope in stack)


def thread_state() -> dict[str, Any]:
    """Returns what Keras knows in this thread: its scopes, the layers that are being built."""
    return dict(vars(global_state.GLOBAL_STATE_TRACKER))


@contextlib.contextmanager
def thread_state_of(state: dict[str, Any]) -> Iterator[None]:
    """Within it, Keras knows in this thread what `thread_state` has returned in another."""
    here = vars(global_state.GLOBAL_STATE_TRACKER)
    before = dict(here)
    here.update(state)
    try:
        yield
    finally:
        here.clear()
        here.update(before)


def global_generator() -> Any | None:
    """Returns what `keras.random` draws seeds from in this thread where no seed is given; None: nothing has been drawn yet."""
    return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)


def set_global_generator(generator: Any | None) -> None:
    """Sets what `global_generator` returns in this thread: an object with the methods of a `SeedGenerator`."""
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)


def outermost_layer() -> Any | None:
    """Returns the layer or model whose call the one that is called here is part of, by layers within layers; None in no call."""
    context = global_state.get_global_attribute("current_call_ctx")
    return None if context is None else context.entry_layer


def layers_within(layer: Any | None) -> list[Any]:
    """Returns `layer` and all layers within it; none for None."""
    return list(layer._flatten_layers()) if isinstance(layer, keras.layers.Layer) else []


def autocast_dtype() -> tf.DType | None:
    """Returns the dtype in which layers compute here and read their float variables; None: each variable's own."""
    scope = get_autocast_scope()
    return None if scope is None or scope.dtype is None else tf.as_dtype(scope.dtype)


def own_variables(layer: Any) -> list[tuple[tf.Variable, keras.Variable, bool]]:
    """Returns the trainable variables that `layer` itself made, frozen or not, without those of its sublayers.

    Each as TensorFlow's and as Keras's, and whether Keras reads it in the layer's compute dtype.
    """
    if not isinstance(layer, keras.layers.Layer):
        return []  # an optimizer has a list of that name too: everybody's variables
    # Not `value`, which would read the variable to cast it.
    return [(variable._value, variable, variable._autocast) for variable in layer._trainable_variables]
