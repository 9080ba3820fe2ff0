"""Variables: where and when a weight is made, in which dtype it is read, and what is noted when a layer assigns to it."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.keras_hooks.table import replaces
from tfdist.keras_layers import layer_strategy
from tfdist.keras_layers.statistics import note_assigned, value_to_assign
from tfdist.sharding import ReplicatedMirroredVariable, ShardedVariable, kept_placement, keras_scope, placement
from tfdist.sharding.deferral import DEFERRAL
from tfdist.sharding.separate_thread import outside_ranks

_LATER = """Under a pipeline nobody knows in which stage a layer will be when it is built: its weights are made when that is
known, and never on another stage's ranks."""


@replaces(
    "keras.Variable",
    "_initialize_with_initializer",
    why=f"""{_LATER} What a layer makes outside `scope()` (`enable_lora`) belongs to the layer's strategy. What a step makes is
    made apart from it: TensorFlow would trace the step a second time, and not make it in a loop.""",
)
def _initialize_with_initializer(original: Callable[..., None], self: Any, initializer: Callable[..., Any]) -> None:
    with layer_strategy.scope_of(keras_scope.callers()):  # of the layer that is being built or called, or of one around it
        layer_strategy.note_made(keras_scope.callers())
        outside_ranks(lambda: _initialize(original, self, initializer))


def _initialize(original: Callable[..., None], self: Any, initializer: Callable[..., Any]) -> None:
    if not DEFERRAL.now.defer(self, initializer):
        with placement(**kept_placement(self)):
            original(self, initializer)
        if isinstance(self._value, ReplicatedMirroredVariable):
            self._value.is_of_keras = True


@replaces("keras.Variable", "_deferred_initialize", why=_LATER)
def _deferred_initialize(original: Callable[..., None], self: Any) -> None:
    if not DEFERRAL.now.stays_deferred(self):
        original(self)


@replaces("keras.Variable", "assign", why=f"{_LATER} Assigned before, it is made on all: its value counts.")
def _assign(original: Callable[..., Any], self: Any, value: Any) -> Any:
    DEFERRAL.now.make_to_assign(self)
    return original(self, value)


@replaces("keras.Variable", "_direct_assign")
def _direct_assign(original: Callable[..., None], self: Any, value: Any) -> None:
    """What a step assigns is of a rank's own examples: it becomes that of the global batch, or is averaged at the step's end. So
    is what is assigned to a variable that is TensorFlow's alone (`ReplicatedMirroredVariable`)."""
    original(self, value_to_assign(self._value, self.path, value))
    note_assigned(self._value)


@replaces("keras.src.backend.common.variables.AutocastScope", "maybe_cast")
def _maybe_cast(original: Callable[..., Any], self: Any, value: Any) -> Any:
    """Keras casts a weight after it has read it; a sharded one is cast before it travels, in half the bytes."""
    if isinstance(value, ShardedVariable) and self.dtype is not None and value.dtype.is_floating:
        return value.cast_read(tf.as_dtype(self.dtype))
    return original(self, value)
