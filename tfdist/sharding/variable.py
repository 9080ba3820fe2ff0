"""A variable of which every rank stores a shard."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.checkpoint import tensor_callable
from tensorflow.python.distribute import distribute_lib, values, values_util
from tensorflow.python.trackable import base as trackable

from tfdist import errors
from tfdist.collectives import RankProgram, Where, current_program, nested_functions, rank_program, where
from tfdist.graphs import tape
from tfdist.sharding import keras_scope, packing, weight_cache
from tfdist.sharding.assembly import assemble, is_elsewhere
from tfdist.sharding.layout import Layout
from tfdist.sharding.replicated_variables import AsNumber, note_from_outside
from tfdist.sharding.slot_reads import SlotReads
from tfdist.sharding.unshard import UnshardSchedule

# What TensorFlow asks of an object that is not a variable yet.
_NOT_DELEGATED = ("_values", "_use_resource_variables", "_attribute_sentinel", "_distributed_container")


class NotHereError(RuntimeError):
    """A rank uses a variable that only ranks at other places of the axis "pipe" store."""


class ShardedVariable(AsNumber, values.DistributedVariable):
    """A `tf.distribute` variable that looks whole from outside and is stored in shards.

    * Outside replicas it is the full variable: `shape` is the global shape, `numpy()` unshards, `assign()` shards. So saving,
      loading and `summary()` know nothing of sharding.
    * Inside a replica a parameter reads as what a layer computes with: its full value, gathered with its group, or, of one that
      is sharded over the tensor axis, this rank's shard; an optimizer slot reads as its full value too, and in a step of the
      optimizer as this rank's shard.
    * To a gradient tape it is one variable outside replicas, `handle`, whose gradient has the global shape; inside a replica it
      is this rank's component.

    Args:
        strategy: the strategy that made it.
        components: the local ranks' shards, one `tf.Variable` per rank, each on its rank's device.
        layout: which shard each rank stores.
        ranks: the ranks of `components`.
        aggregation: `tf.VariableAggregation` of assignments inside replicas. NONE: all ranks assign the same value.
        is_parameter: whether it reads as its full value inside replicas; False for optimizer slots.

    Attributes:
        number: counts the variables of the process, in the order in which they were made.
        maker: returns the layer in whose scope it was made, or None: outside layers, or when the layer is gone.
    """

    _next_number = itertools.count()

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        components: Sequence[tf.Variable],
        layout: Layout,
        ranks: Sequence[int],
        aggregation: tf.VariableAggregation = tf.VariableAggregation.NONE,
        is_parameter: bool = False,
    ):
        self.layout = layout
        self.number = next(self._next_number)
        self.is_parameter = is_parameter
        self.exact: ShardedVariable | None = None  # what is updated where copies are rounded: see `exact_shards`
        self.residual: Any = None  # a `Residual`, where what compressed gradients lose is kept
        self.is_autocast = False  # whether its layer reads it in the compute dtype
        self.keras_variable: Callable[[], Any] = lambda: None  # what its layer knows it as
        self._whole: Any = None  # what gradient tapes know it by outside replicas, when they do
        self._ranks = tuple(ranks)
        self._full_shape = tf.TensorShape(layout.shape)
        super().__init__(strategy, components, aggregation)
        if is_parameter:
            weight_cache.watch(self)
        layer = keras_scope.current_layer()
        self.maker: Callable[[], Any] = (lambda: None) if layer is None else weakref.ref(layer)

    # What it is

    @property
    def shape(self) -> tf.TensorShape:
        """The global shape; inside a replica that of this rank's shard over the tensor axis, as the variable reads there."""
        layout = self.layout
        if layout.is_tensor_sharded and rank_program() is not None:
            return tf.TensorShape(layout.local_shape)
        return self._full_shape

    def get_shape(self) -> tf.TensorShape:
        return self.shape

    @property
    def device(self) -> str:
        return self._local_component().device

    @property
    def is_frozen(self) -> bool:
        """Whether the layer that made it has been frozen since: its gradient is not wanted."""
        variable = self.keras_variable()
        return variable is not None and not variable.trainable

    def _is_mirrored(self) -> bool:
        return True

    def component(self, rank: int) -> tf.Variable:
        """Returns the shard that local rank `rank` stores."""
        return self._values[self._ranks.index(rank)]

    def _local_component(self) -> tf.Variable:
        replica = values_util.get_current_replica_id_as_int()
        return self._values[replica or 0]

    # Reading

    def cast_read(self, dtype: tf.DType) -> tf.Tensor:
        """Reads in `dtype`: what is gathered is cast before it travels."""
        return tf.cast(self._read(dtype), dtype)

    def _read(self, dtype: tf.DType | None = None) -> tf.Tensor | tf.Variable:
        """Returns what a read means where it is made: the full value, the local shard, or, in an update, the local component.

        `dtype` is that in which a gathered value is wanted; None: the variable's.
        """
        # Outside `scope()` TensorFlow's default context reports replica 0 and would read one shard.
        with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
            match where():
                case Where.SYMBOLIC_BUILD | Where.CROSS_REPLICA:
                    return self._assemble()
                case Where.TRACED_RANK | Where.EAGER_RANK if self.is_parameter:
                    return self._read_parameter(rank_program(), dtype or self.dtype)
                case Where.NO_RANK if self.is_parameter:
                    if is_elsewhere(self):
                        current_program(f"Reading the sharded variable {self.name!r}")  # raises: shards are elsewhere
                    return self._assemble()
                case Where.TRACED_RANK | Where.EAGER_RANK:
                    self._check_is_here(rank_program())
                    return rank_program().part(SlotReads).read(self)
                case _:
                    return self._local_component()

    def _read_parameter(self, program: RankProgram, dtype: tf.DType) -> tf.Tensor | tf.Variable:
        """Returns what the rank of `program` computes with: its component, or where that is a flat shard, the gathered value."""
        self._check_is_here(program)
        if not self.layout.is_data_sharded:
            return self._local_component()
        reader = program.root.parameter_reader or program.with_way_back().part(UnshardSchedule)
        return reader.read(self, dtype)

    def _check_is_here(self, program: RankProgram) -> None:
        """Raises NotHereError on a rank that stores nothing of the variable, nor can gather it from its data and tensor peers."""
        here, owners = program.mesh.coordinate(program.rank).pipe, self.layout.pipe_owners
        if owners is not None and here not in owners:
            raise NotHereError(
                f"Variable {self.name!r} lives on pipe rank {' and '.join(map(str, owners))}, but is used on {here}."
            )

    def _assemble(self) -> tf.Tensor:
        """Returns the full value, to gradient tapes a read of this variable. See `assemble`."""
        if len(self._values) > 1:
            nested_functions.check_not_compiled(f"The variable {self.name!r}, of which several devices have a part, is read")
        full = self._distribute_strategy.extended.weight_cache.read(self, assemble)
        return full if where() is Where.SYMBOLIC_BUILD else tape.read_of(self, full)

    def __getattr__(self, name: str) -> Any:
        # The base class would read the variable, and so gather it, to look for any attribute on its value. Only what TensorFlow
        # keeps on variables, all alike on the components, is looked up there.
        if name.startswith("__") or name.startswith("_self_") or not name.startswith("_") or name in _NOT_DELEGATED:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._values[0], name)

    def _get(self) -> tf.Tensor | tf.Variable:
        return self._read()

    def _get_cross_replica(self) -> tf.Tensor:
        return self._assemble()

    _get_on_device_or_primary = _get

    def value(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._read())

    read_value = value

    def numpy(self) -> Any:
        if not tf.executing_eagerly():
            raise NotImplementedError("numpy() is only available when eager execution is enabled.")
        return assemble(self).numpy()

    def _dense_var_to_tensor(self, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
        return tf.convert_to_tensor(self._read(), dtype=dtype, name=name)

    @property
    def handle(self) -> tf.Tensor:
        """The handle of this rank's component; outside replicas one of the global shape, which only gradient tapes know."""
        if where() in (Where.SYMBOLIC_BUILD, Where.CROSS_REPLICA, Where.NO_RANK):
            if self._whole is None:
                self._whole = tape.handle_without_value(self)
            return self._whole.handle
        return self._local_component().handle

    # Writing

    def _shard_for(self, value: Any, index: int) -> Any:
        """Returns the shard of a full `value` that the component at `index` stores; a component's own shape passes through."""
        if isinstance(value, tf.distribute.DistributedValues):
            value = value.values[index]
        value = tf.convert_to_tensor(value, self.dtype)
        layout = self.layout
        coordinate = layout.mesh.coordinate(self._ranks[index])
        if value.shape == self._values[index].shape and value.shape != self._full_shape:
            return value
        if value.shape == self._full_shape:
            value = packing.tensor_shard(value, layout, coordinate)
        if not value.shape.is_compatible_with(layout.local_shape):
            raise errors.value_error(
                f"Variable {self.name!r} has shape {layout.shape}; the value assigned must have it too.",
                shape=tuple(value.shape),
            )
        if not layout.stores(coordinate):
            # In a graph it is made of the value: what that is computed of, all ranks must compute.
            return tf.reshape(value, [-1])[:0] if tf.is_symbolic_tensor(value) else tf.zeros([0], self.dtype)
        if not layout.is_data_sharded:
            return value
        shard = packing.data_shard(value, layout, coordinate.data)
        # A slice shares its parent's buffer: without the copy the full value would live as long as the shard.
        return tf.raw_ops.DeepCopy(x=shard) if tf.executing_eagerly() else shard

    def _update_cross_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        note_from_outside(self, value)
        updates = []
        for index, component in enumerate(self._values):
            with tf.device(component.device), distribute_lib.UpdateContext(index):
                updates.append(update_fn(component, self._shard_for(value, index), **kwargs))
        return self if tf.executing_eagerly() else tf.group(*[update for update in updates if update is not None])

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        index = values_util.get_current_replica_id_as_int()
        program = rank_program()
        if program is not None and self.is_parameter:
            self._check_is_here(program)
            (program.here() or program).part(UnshardSchedule).invalidate()
        if program is not None:
            program.part(SlotReads).note_written(self)
        if self._aggregation in (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN) and self.is_parameter:
            reduce_op = tf.distribute.ReduceOp[self._aggregation.name]
            value = tf.distribute.get_replica_context().all_reduce(reduce_op, value)
        return update_fn(self._local_component(), self._shard_for(value, index), **kwargs)

    def _no_scatter(self, *args: Any, **kwargs: Any) -> Any:
        raise errors.not_implemented(
            f"Scatter updates of the sharded variable {self.name!r} are not supported.",
            fix="Assign the whole value with `assign`, or use a `zero_stage` that does not shard it.",
        )

    scatter_sub = scatter_add = scatter_mul = scatter_div = _no_scatter
    scatter_min = scatter_max = scatter_update = scatter_nd_update = _no_scatter

    # Saving

    def _serialize_to_tensors(self) -> dict[str, Any]:
        """A checkpoint has the full variable, so that any other program can restore it, and the reverse."""
        whole = tensor_callable.Callable(lambda: assemble(self), self.dtype, self._primary.device)
        return {trackable.VARIABLE_VALUE_KEY: whole}

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return {}  # the base class's would save one shard; now an old `Saver`, too, serializes to tensors

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> tf.Operation:
        """Restores every rank's shard, wherever it is called.

        A checkpoint that was read before the variable existed restores it as soon as it is made: of an optimizer's slot that is
        in the first step, where one rank alone would assign its own shard.
        """
        full = restored_tensors[trackable.VARIABLE_VALUE_KEY]
        note_from_outside(self, full, is_read=True)
        return tf.group(*[component.assign(self._shard_for(full, index)) for index, component in enumerate(self._values)])

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        raise errors.not_implemented(
            f"Variable {self.name!r} is sharded and cannot be written to a SavedModel.",
            fix="Save the weights, load them into the same model built without a strategy, and export that one.",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise NotImplementedError("A ShardedVariable cannot be copied; build the model again in the strategy's scope.")


def read_if_sharded(value: Any) -> Any:
    """Returns what a sharded variable, of Keras or TensorFlow, reads as here; anything else as it is."""
    stored = value._value if isinstance(value, keras.Variable) else value
    return tf.convert_to_tensor(value) if isinstance(stored, ShardedVariable) else value
