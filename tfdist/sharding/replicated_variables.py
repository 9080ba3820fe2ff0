"""Variables that no rank stores a mere part of: TensorFlow's own kinds, with a layout as every variable has.

Note: identity. A variable that is not sharded stays a `MirroredVariable`, and one that ranks add up stays a `SyncOnReadVariable`,
since TensorFlow, Keras and users' code test for these classes (Keras's own tests for the name, too). This file is the one
exception to a variable being a `ShardedVariable`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint import tensor_callable
from tensorflow.python.distribute import distribute_lib, values, values_util
from tensorflow.python.trackable import base as trackable

from tfdist.collectives import Where, cross_replica_of, where
from tfdist.graphs.calls import around_calls
from tfdist.mesh import DeviceMesh
from tfdist.sharding.layout import Layout
from tfdist.sharding.placements import Partial, Placement, Replicate

_Variable: Any = object  # what it is mixed into


class AsNumber:
    """Mixed into a distributed variable: `int(v)`, `float(v)`, `np.array(v)`, `if v:` do what they do with one device's variable.

    What is read is `numpy()`: outside replicas the value of all ranks together, in an eager rank what that reads.
    """

    numpy: Callable[[], Any]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.numpy(), dtype)  # a scalar's `numpy()` is a number
        return array.copy() if copy else array

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())


def note_from_outside(variable: Any, value: Any, *, is_read: bool = False) -> None:
    """Notes that `value` is assigned to `variable` outside of steps, where other workers must assign the same.

    Of what a function computes, of what all hold, the assignment counts, not the value; unless it `is_read` from a file there.
    """
    turns = variable.distribute_strategy.extended.communicator.turns
    if turns is None:
        return
    name = variable.name.partition("/shard_")[0].partition(":")[0]
    number = getattr(variable, "creation_number", 0)  # names may differ: Keras numbers them
    if tf.executing_eagerly():
        # Another variable, whose value all hold alike already, may be one that is read by a message.
        is_known = not isinstance(value, keras.Variable | tf.Variable | tf.distribute.DistributedValues)
        turns.note(number, name, value if is_known else "a variable")
    elif is_read:
        tf.numpy_function(functools.partial(turns.note, number, name), [value], [])
    else:
        around_calls(functools.partial(turns.noted, number, name), key=("written", id(variable)))


class _WithLayout(AsNumber, _Variable):
    """The part that both kinds share: a layout, which copies keep; and to Python and NumPy they are numbers."""

    layout: Layout
    exact: Any = None  # a `ShardedVariable`, which is updated where copies are rounded: see `exact_shards`
    residual: Any = None  # a `Residual`, where what compressed gradients lose is kept

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        copied.layout, copied.exact, copied.residual = self.layout, None, None
        return copied


class ReplicatedMirroredVariable(_WithLayout, values.MirroredVariable):
    """A variable of which every rank stores all.

    Outside replicas, in `strategy.scope()` too, a gradient tape knows it by the handle of the first local rank's copy, which is
    the one that is read there.

    Attributes:
        is_of_keras: whether it stores a variable of Keras, which looks at what is assigned itself.
        update_of_users: of every other one: what a rank, in a step, updates it with (`layers.statistics`).
    """

    is_of_keras = False
    update_of_users: Callable[..., Any]

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        def update(value: Any) -> Any:
            return super(ReplicatedMirroredVariable, self)._update_replica(update_fn, value, **kwargs)

        return update(value) if self.is_of_keras else self.update_of_users(self, value, update)

    def _update_cross_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        note_from_outside(self, value)
        return super()._update_cross_replica(update_fn, value, **kwargs)

    @property
    def handle(self) -> tf.Tensor:
        return self._primary.handle if where() is Where.CROSS_REPLICA else super().handle

    def numpy(self) -> Any:
        """Also in the scope of another strategy, where a model is cloned or its weights are copied to."""
        is_elsewhere = tf.distribute.has_strategy() and tf.distribute.get_strategy() is not self._distribute_strategy
        return self._primary.numpy() if is_elsewhere else super().numpy()

    def _get_cross_replica(self) -> tf.Tensor:
        return tf.identity(self._primary)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return self._primary._serialize_to_tensors()

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return {}  # TensorFlow's would be restored without a word of it

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> tf.Operation:
        """Restores every rank's copy, also in a rank's step, where a variable may be made that a checkpoint was read for."""
        full = restored_tensors[trackable.VARIABLE_VALUE_KEY]
        note_from_outside(self, full, is_read=True)
        return tf.group(*[component.assign(full) for component in self._values])


class PartialSyncOnReadVariable(_WithLayout, values.SyncOnReadVariable):
    """A variable of which every rank stores a value of its own, added up (or averaged) when it is read outside replicas.

    Gradients that are accumulated before they are reduced are such sums, and so are the states of metrics, once ranks update
    them with their own rows. Until then, and where ranks update them with the rows of all, every rank holds all of a metric's
    state (`Replicate()` in the layout), and a read outside replicas is that of the first.

    A value that is assigned to a sum outside replicas is stored by the ranks of data index 0, and the others store zeros:
    TensorFlow would divide it by the number of ranks, which integers cannot be.
    """

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all of it: nothing is to be added up."""
        return self.layout.data == Replicate()

    @property
    def is_sum(self) -> bool:
        return not self.is_whole and self._aggregation == tf.VariableAggregation.SUM

    def hold_summands(self) -> None:
        """From now on each rank holds a summand of its own; what all held becomes that of data index 0."""
        if self.is_whole and self._aggregation in (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN):
            self.layout = dataclasses.replace(self.layout, data=Partial())
            if self.is_sum:
                with tf.init_scope():
                    for index, component in enumerate(self._values):
                        # One that is made while a step is traced gets its initial value when the step first runs: zeros.
                        if not self._is_first(index) and component.is_initialized():
                            component.assign(tf.zeros(component.shape, component.dtype))

    def hold_whole(self) -> None:
        """From now on every rank holds all of it."""
        if not self.is_whole:
            self.layout = dataclasses.replace(self.layout, data=Replicate())
            with tf.init_scope():
                if self._aggregation == tf.VariableAggregation.SUM and all(one.is_initialized() for one in self._values):
                    total = tf.add_n([tf.identity(one) for one in self._values])
                    for component in self._values:
                        component.assign(total)

    def _is_first(self, index: int) -> bool:
        ranks = self._distribute_strategy.extended.communicator.local_ranks
        return self.layout.mesh.coordinate(ranks[index]).data == 0

    def _store(self, value: Any, method: str = "assign") -> tf.Operation:
        """Updates a sum on data index 0 alone, else every component, by the `method` of the components."""
        value = tf.cast(value, self.dtype)
        updates = []
        for index, component in enumerate(self._values):
            with tf.device(component.device):
                if self._is_first(index) or not self.is_sum:
                    updates.append(getattr(component, method)(value, read_value=False))
                elif method == "assign":
                    updates.append(component.assign(tf.zeros_like(component), read_value=False))
        return tf.group(*updates)

    def _update_from_outside(self, inherited: Callable[..., Any], value: Any, read_value: bool, **kwargs: Any) -> Any:
        if not values_util.is_saving_non_distributed() and self._aggregation == tf.VariableAggregation.SUM:
            with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
                if distribute_lib.in_cross_replica_context() and not values_util.in_replica_update_context():
                    update = self._store(value, inherited.__name__)
                    with tf.control_dependencies([] if tf.executing_eagerly() else [update]):
                        return self.read_value() if read_value else update
        return inherited(value, read_value=read_value, **kwargs)

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        return self._update_from_outside(super().assign, value, read_value, use_locking=use_locking, name=name)

    def assign_add(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        return self._update_from_outside(super().assign_add, value, read_value, use_locking=use_locking, name=name)

    def assign_sub(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        return self._update_from_outside(super().assign_sub, value, read_value, use_locking=use_locking, name=name)

    def _get_cross_replica(self) -> Any:
        if not self.is_whole:
            return super()._get_cross_replica()
        mesh, cross_replica = self.layout.mesh, cross_replica_of(self._distribute_strategy)
        if mesh.pipeline_parallel_size == 1:
            return self._values[0].read_value()
        # Of the ranks along "pipe" the last computes metrics; it may be another worker's.
        if cross_replica.is_multi_worker:
            return cross_replica.all_reduce([component.read_value() for component in self._values], "max", "metrics")[0]
        ranks = self._distribute_strategy.extended.communicator.local_ranks
        last = max(range(len(ranks)), key=lambda index: mesh.coordinate(ranks[index]).pipe)
        return self._values[last].read_value()

    def _serialize_to_tensors(self) -> dict[str, Any]:
        total = tensor_callable.Callable(self._get_cross_replica, self.dtype, self._primary.device)
        return {trackable.VARIABLE_VALUE_KEY: total}

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return {}  # TensorFlow's would be restored divided by the number of ranks

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> tf.Operation:
        """Restores the sum, wherever it is called."""
        return self._store(restored_tensors[trackable.VARIABLE_VALUE_KEY])


def with_layout(variable: tf.Variable, mesh: DeviceMesh, is_of_metric: bool = False) -> tf.Variable:
    """Returns a variable that TensorFlow has made as one that has a layout; one whose shape is not known is left alone."""
    if not variable.shape.is_fully_defined():
        return variable
    # Where ranks store different layers, those with the last ones alone update metrics: how they hold them, others do not learn.
    is_whole = is_of_metric and not mesh.splits_layers
    kinds: dict[type, tuple[type, Placement]] = {
        values.MirroredVariable: (ReplicatedMirroredVariable, Replicate()),
        values.SyncOnReadVariable: (PartialSyncOnReadVariable, Replicate() if is_whole else Partial()),
    }
    if type(variable) in kinds:
        variable.__class__, data = kinds[type(variable)]
        variable.layout = Layout(tuple(variable.shape.as_list()), mesh, data=data)
    return variable
