"""How the variable that is made next is to be placed: asked for in one scope, which the strategy reads when it makes a variable.

    with placement(tensor=Shard(1)):            a layer's weight, sharded over the tensor axis
    with placement(is_replicated=True):         an optimizer's scalar, which is no parameter though Keras calls it trainable

Scopes nest: an inner one changes what it names. A variable made within `tf.distribute`'s own `colocate_vars_with(parameter)`, as
Keras makes optimizer slots, is a slot of that parameter. Without any request a trainable variable is a parameter, and every other
one is replicated.

Keras may put off making a variable, and makes it without a word of where. A request that is to hold then is kept on the Keras
variable (`request_placement`), and opened whenever its value is made (`kept_placement`).
"""

import contextlib
import contextvars
import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfdist import temporary
from tfdist.graphs import tape
from tfdist.sharding.config import MeshConfig
from tfdist.sharding.layout import Layout
from tfdist.sharding.placements import Own, Replicate, Shard
from tfdist.sharding.separate_thread import outside_ranks

_KEPT = "_tfdist_placement"


@dataclasses.dataclass(frozen=True)
class PlacementRequest:
    """A request for a variable's placement.

    Attributes:
        tensor: the tensor axis of it that is sharded over the mesh's tensor axis, if one is.
        pipe_owners: the pipe ranks that store it, ascending; None: all.
        slot_of: the layout of the parameter whose optimizer state it is; None: it is no such state.
        data_owner: the place in its sharding group of the rank that alone keeps the slot there, whole; None: it is sharded as the
            ZeRO stage says.
        is_partial: whether each rank keeps a summand of it.
        is_replicated: whether every data rank keeps all of it, though it is trainable.
        is_of_metric: whether it is a metric's state (see `PartialSyncOnReadVariable`).
    """

    tensor: Replicate | Shard = Replicate()
    pipe_owners: tuple[int, ...] | None = None
    slot_of: Layout | None = None
    data_owner: int | None = None
    is_partial: bool = False
    is_replicated: bool = False
    is_of_metric: bool = False

    def may_shard(self, is_trainable: bool, config: MeshConfig) -> bool:
        """Whether a variable of some shape and dtype is sharded that is made on this request."""
        if self.is_partial:
            return False
        if self.slot_of is not None:
            return self.slot_of.is_sharded or config.placements.optimizer_state != Replicate()
        is_parameter = is_trainable and not self.is_replicated and config.placements.parameter != Replicate()
        return is_parameter or self.tensor != Replicate() or self.pipe_owners is not None

    def layout(self, spec: tf.TensorSpec | tf.Tensor, is_trainable: bool, config: MeshConfig) -> Layout:
        """Returns the layout of a variable of the shape and dtype of `spec`, which is no sum of summands."""
        mesh, shape, is_floating = config.mesh, tuple(spec.shape.as_list()), spec.dtype.is_floating
        parameter = self.slot_of
        if parameter is not None:
            if not is_floating or shape != parameter.shape:
                return Layout(shape, mesh, pipe_owners=parameter.pipe_owners)
            if self.data_owner is not None:
                return dataclasses.replace(parameter, tensor=Replicate(), data=Own(self.data_owner))
            return config.slot_layout(parameter)
        is_parameter = is_trainable and is_floating and not self.is_replicated
        data = config.placements.parameter if is_parameter else Replicate()
        return Layout(shape, mesh, tensor=self.tensor, data=data, pipe_owners=self.pipe_owners)


_current = contextvars.ContextVar("placement", default=PlacementRequest())  # noqa: B039 (it is frozen)


def current_placement() -> PlacementRequest:
    """Returns what is asked for of a variable that is made here."""
    return _current.get()


def placement(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """Within it, variables are asked for with `changes` (attributes of `PlacementRequest`), and what is asked for around it."""
    return temporary.context_value(_current, dataclasses.replace(_current.get(), **changes))


def request_placement(variable: keras.Variable, **changes: Any) -> None:
    """Asks for `changes` of `variable` whenever its value is made; if it is made already, it is made again and stays the same.

    `_value`, `_trainable` and `_initialize_with_initializer` are private to Keras: test_private_names_of_layers.py fails
    when they change.
    """
    setattr(variable, _KEPT, {**kept_placement(variable), **changes})
    if variable._value is not None:
        outside_ranks(lambda: _make_anew(variable))


def _make_anew(variable: keras.Variable) -> None:
    # One that holds no value is made anew without one.
    whole = None if tape.is_without_value(variable._value) else tf.identity(variable._value)
    # A weight that was frozen after it was made stays one of the parameters, which ZeRO shards.
    is_trainable, variable._trainable = variable._trainable, variable._value.trainable
    with tf.init_scope():
        variable._initialize_with_initializer(lambda shape, dtype=None: tf.cast(whole, dtype))
    variable._trainable = is_trainable


def kept_placement(variable: keras.Variable) -> dict[str, Any]:
    """Returns what is asked for of `variable` whenever its value is made; `placement` takes it."""
    return getattr(variable, _KEPT, {})
