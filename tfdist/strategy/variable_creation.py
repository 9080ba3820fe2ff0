"""How a tfdist strategy makes a variable: its layout follows from the `PlacementRequest`, its shape and its dtype.

A `tf.TensorSpec` as the initial value is that of a variable that holds none. Creators outside the strategy's, which are asked for
what each rank stores, get specs then, too, and must make such variables: TensorFlow's own does not.
"""

import dataclasses
import itertools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import values
from tensorflow.python.eager import record

from tfdist import errors
from tfdist.collectives import Communicator
from tfdist.sharding import Layout, MeshConfig, PlacementRequest, ShardedVariable, current_placement, with_layout

_SYNC_ON_READ = tf.VariableSynchronization.ON_READ
# What `tf_keras` does with losses and gradients under a strategy would be its own.
_INSTEAD = (
    "Use Keras 3: `import keras` in the place of `tf_keras`, without `TF_USE_LEGACY_KERAS`; or stay with Keras 2 and "
    "`tf.distribute.MirroredStrategy`."
)


# The extended class of TensorFlow that it is mixed into: the type checker is not to ask what that has.
_Extended: Any = object


class VariableCreation(_Extended):
    """The part of a strategy's extended class that makes variables; before TensorFlow's class."""

    _sharding: MeshConfig
    communicator: Communicator
    created: "itertools.count[int]"

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        """Makes a variable of TensorFlow's own, or a `ShardedVariable` where some rank stores less than all of it."""
        _check_caller(kwargs.get("name"))
        request = self._request(kwargs)
        is_slot = request.slot_of is not None
        layout = self._sharded_layout(request, kwargs)
        if kwargs.get("initial_value") is not None and (layout is None or not is_slot):
            self._share_initial_value(kwargs, layout)
        if layout is None:
            made = with_layout(super()._create_variable(next_creator, **kwargs), self._sharding.mesh, request.is_of_metric)
        else:
            made = self._create_sharded(next_creator, layout, is_slot, kwargs)
        made.creation_number = next(self.created)  # the same on all workers
        self._check_compressible(made, is_slot)
        return made

    def _check_compressible(self, variable: tf.Variable, is_slot: bool) -> None:
        """Raises ValueError for a parameter whose gradient would lose digits, or a part, in float32."""
        is_wider = variable.dtype.size > 4 and not variable.dtype.is_integer or variable.dtype.is_complex
        if self._sharding.compresses and is_wider and variable.trainable and not is_slot:
            setting = self._sharding.compressing_setting
            (name,) = setting
            raise errors.value_error(
                f"`{name}` decodes gradients in float32, and variable {variable.name!r} is of another kind.",
                dtype=variable.dtype.name,
                fix=f"Make it float32, or not trainable, or leave `{name}` out.",
                **setting,
            )

    def _request(self, kwargs: dict[str, Any]) -> PlacementRequest:
        """Returns what is asked for of the variable, and brings `kwargs` in line with it."""
        request = current_placement()
        reference = kwargs.get("colocate_with")
        if isinstance(reference, values.DistributedVariable):
            del kwargs["colocate_with"]
            request = dataclasses.replace(request, slot_of=getattr(reference, "layout", None))
        if kwargs.get("aggregation") == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            # All ranks compute the same value; NONE stores it without a merge of the ranks.
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        if request.is_partial:
            kwargs.update(synchronization=_SYNC_ON_READ, aggregation=tf.VariableAggregation.SUM)
        return request

    def _sharded_layout(self, request: PlacementRequest, kwargs: dict[str, Any]) -> Layout | None:
        """Returns the layout of the variable to make, or None when every rank stores all of it.

        The initial value of what may be sharded is drawn here, once and whole.
        """
        if kwargs.get("initial_value") is None:
            return None  # of a SavedModel, whose functions read it by its handle, and which restores it
        if kwargs.get("synchronization") == _SYNC_ON_READ:
            if request.pipe_owners is not None:
                raise errors.not_implemented(
                    f"Variable {kwargs.get('name')!r} sums its ranks' values when it is read, which a weight of a pipeline "
                    "stage cannot.",
                    fix="Make it without `synchronization` and `aggregation`, or count outside the model.",
                )
            return None
        is_trainable = kwargs.get("trainable") is not False
        if not request.may_shard(is_trainable, self._sharding):
            return None
        owners = request.pipe_owners if request.slot_of is None else request.slot_of.pipe_owners
        layout = request.layout(self._initial_spec(kwargs, owners), is_trainable, self._sharding)
        return layout if layout.is_sharded else None

    def _share_initial_value(self, kwargs: dict[str, Any], layout: Layout | None) -> None:
        """For strategies of several workers: replaces the initial value by the chief's, or its first owner's."""

    def _initial_spec(self, kwargs: dict[str, Any], pipe_owners: tuple[int, ...] | None) -> tf.Tensor | tf.TensorSpec:
        """Returns what the initial value is; drawn where a rank of this process stores it, else only its shape and dtype."""
        if isinstance(kwargs["initial_value"], tf.TensorSpec):
            return kwargs["initial_value"]
        mesh = self._sharding.mesh
        if pipe_owners is not None:
            storing = [rank for rank in self.communicator.local_ranks if mesh.coordinate(rank).pipe in pipe_owners]
            if not storing:
                initial, dtype = kwargs["initial_value"], kwargs.get("dtype")

                def drawn() -> tf.Tensor:
                    return tf.convert_to_tensor(initial() if callable(initial) else initial, dtype)

                symbolic = tf.function(drawn, autograph=False).get_concrete_function().outputs[0]
                return tf.TensorSpec(symbolic.shape, symbolic.dtype)
            return self._initial_value(kwargs, mesh.devices[storing[0]])
        return self._initial_value(kwargs)

    def _initial_value(self, kwargs: dict[str, Any], device: str | None = None) -> tf.Tensor:
        """Draws the initial value and puts it back in `kwargs`, so that it is drawn once."""
        with tf.init_scope(), record.stop_recording(), tf.device(device or self._local_devices()[0]):
            initial = kwargs["initial_value"]
            initial = initial() if callable(initial) else initial
            initial = getattr(initial, "wrapped_value", initial)  # of a checkpoint
            if tf.is_symbolic_tensor(initial):
                initial = tf.get_static_value(initial)
            if initial is None or not tf.executing_eagerly():
                raise errors.runtime_error(
                    f"Variable {kwargs.get('name')!r} is to be sharded, but it is made inside a `tf.function` from a value "
                    "that only exists when the function runs.",
                    fix="Make it in `strategy.scope()` before the function is called, or from an initializer.",
                )
            kwargs["initial_value"] = tf.convert_to_tensor(initial, kwargs.get("dtype"))
        return kwargs["initial_value"]

    def _create_sharded(
        self, next_creator: Callable[..., tf.Variable], layout: Layout, is_slot: bool, kwargs: dict[str, Any]
    ) -> ShardedVariable:
        initial = kwargs.pop("initial_value")  # still a function where no rank of this process stores the variable
        full = initial.numpy() if isinstance(initial, tf.Tensor) else None
        kwargs.pop("shape", None)
        if kwargs.get("synchronization") in (None, tf.VariableSynchronization.AUTO):
            kwargs["synchronization"] = tf.VariableSynchronization.ON_WRITE  # as of mirrored variables
        name = kwargs.pop("name", None) or "Variable"
        mesh = self._sharding.mesh
        aggregation = kwargs.get("aggregation") or tf.VariableAggregation.NONE
        components = []
        ranks = self.communicator.local_ranks
        for rank in ranks:
            coordinate = mesh.coordinate(rank)
            # `layout.shard` copies: a slice would keep the full value alive as long as the shard.
            with tf.init_scope(), record.stop_recording(), tf.device(mesh.devices[rank]):
                if layout.stores(coordinate) and isinstance(initial, tf.TensorSpec):
                    shard = tf.TensorSpec(layout.component_shape, initial.dtype)
                elif layout.stores(coordinate):
                    shard = tf.convert_to_tensor(layout.shard(full, coordinate))
                else:
                    shard = tf.zeros([0], kwargs.get("dtype"))
                components.append(next_creator(initial_value=shard, name=f"{name}/shard_{rank}", **kwargs))
        return ShardedVariable(self._container_strategy(), components, layout, ranks, aggregation, is_parameter=not is_slot)

    def _local_devices(self) -> list[str]:
        return [self._sharding.mesh.devices[rank] for rank in self.communicator.local_ranks]


def check_keras() -> None:
    """Raises NotImplementedError where `tf.keras` is Keras 2."""
    value = os.environ.get("TF_USE_LEGACY_KERAS", "")
    if value.strip().lower() in ("1", "true"):
        raise errors.not_implemented(
            "tfdist trains models of Keras 3, and `tf.keras` is Keras 2.", TF_USE_LEGACY_KERAS=value, fix=_INSTEAD
        )


def _check_caller(name: str | None) -> None:
    """Raises NotImplementedError where Keras 2 makes the variable `name`."""
    callers = traceback.walk_stack(None) if "tf_keras" in sys.modules else ()
    if any((frame.f_globals.get("__name__") or "").partition(".")[0] == "tf_keras" for frame, _ in callers):
        raise errors.not_implemented(
            "A layer, a metric or an optimizer of `tf_keras` (Keras 2) makes a variable under a tfdist strategy.",
            variable=name,
            fix=_INSTEAD,
        )
