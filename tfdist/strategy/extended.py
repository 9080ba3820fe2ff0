"""The `StrategyExtended` of tfdist: what TensorFlow asks of a strategy, answered with sharded variables."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.distribute import (
    cross_device_ops,
    distribute_utils,
    input_util,
    mirrored_run,
    mirrored_strategy,
    values,
    values_util,
)
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from tfdist import collectives, errors, keras_hooks
from tfdist.collectives import (
    CollectivePlan,
    Communicator,
    CrossReplica,
    EagerProgram,
    Meeting,
    RankProgram,
    Where,
    choose_transport,
    rank_program,
    where,
)
from tfdist.data import split_batches
from tfdist.layers import cut_tensors
from tfdist.optimizers import owner_of
from tfdist.runtime import give_back_free_memory
from tfdist.sharding import (
    Layout,
    MeshConfig,
    Own,
    ParameterGroups,
    Replicate,
    ShardedVariable,
    current_owners,
    keras_scope,
    tensor_cut,
    with_layout,
)

_SYNC_ON_READ = tf.VariableSynchronization.ON_READ


class ShardedExtendedMixin:
    """What every tfdist strategy adds to a mirrored one, whatever transport it stands on."""

    def _setup(self, sharding: MeshConfig, local_ranks: Iterable[int] | None = None, implementation: str = "AUTO") -> None:
        keras_hooks.install()
        self._sharding = sharding
        ranks = range(sharding.mesh.world_size) if local_ranks is None else tuple(local_ranks)
        transport = choose_transport(sharding.mesh.devices, implementation, len(ranks) < sharding.mesh.world_size)
        self._communicator = Communicator(sharding.mesh, transport, ranks)
        self.cross_replica = CrossReplica(self._communicator)
        self._parameter_groups = ParameterGroups(sharding.group_bytes)
        self._graph_functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.last_plan: CollectivePlan | None = None
        self._is_summed_on_read = False

    @property
    def communicator(self) -> Communicator:
        return self._communicator

    # Variables

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        """Makes a parameter (trainable), a slot (colocated with a parameter) or something that stays replicated."""
        if kwargs.get("aggregation") == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            # All ranks compute the same value; NONE stores it without a merge of the ranks.
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        if self._is_summed_on_read:
            kwargs.pop("colocate_with", None)
            kwargs.update(synchronization=_SYNC_ON_READ, aggregation=tf.VariableAggregation.SUM)
        layout = self._layout_for(kwargs)
        is_slot = kwargs.get("colocate_with") is not None
        if layout is None or not is_slot:
            self._share_initial_value(kwargs, layout)
        if layout is None:
            return with_layout(super()._create_variable(next_creator, **kwargs), self._sharding.mesh)
        kwargs.pop("colocate_with", None)
        return self._create_sharded(next_creator, layout, is_slot, kwargs)

    def _layout_for(self, kwargs: dict[str, Any]) -> Layout | None:
        """Returns the layout of the variable to make, or None when sharding does not concern it.

        What it concerns gets its initial value drawn here, once and whole.
        """
        if kwargs.get("synchronization") == _SYNC_ON_READ:
            if current_owners() is not None:
                raise NotImplementedError(
                    errors.message(
                        f"Variable {kwargs.get('name')!r} sums its ranks' values when it is read, which a weight of a pipeline "
                        "stage cannot.",
                        fix="Make it without `synchronization` and `aggregation`, or count outside the model.",
                    )
                )
            return None
        reference = kwargs.get("colocate_with")
        if reference is None:
            return None if keras_scope.in_optimizer() else self._parameter_layout(kwargs)
        if not isinstance(reference, values.DistributedVariable):
            return None
        layout = reference.layout
        owners = layout.pipe_owners
        if not layout.is_sharded and isinstance(self._sharding.placements.optimizer_state, Replicate):
            return None
        full = self._initial_spec(kwargs, owners)
        if not full.dtype.is_floating or full.shape != reference.shape:
            return None if owners is None else Layout(full.shape, self._sharding.mesh, pipe_owners=owners)
        owner = owner_of(keras_scope.current_layer(), reference)
        if owner is not None:
            return dataclasses.replace(layout, tensor=Replicate(), data=Own(owner))
        return self._sharding.slot_layout(layout)

    def _parameter_layout(self, kwargs: dict[str, Any]) -> Layout | None:
        """Returns the layout of a layer's variable, None if every rank stores all of it."""
        is_frozen = kwargs.get("trainable") is False
        is_replicated = is_frozen or isinstance(self._sharding.placements.parameter, Replicate)
        owners = current_owners()
        if is_replicated and self._sharding.mesh.tensor_parallel_size == 1 and owners is None:
            return None
        with tensor_cut.wishes() as wish:
            full = self._initial_spec(kwargs, owners)
            tensor = wish()
        is_whole = not full.dtype.is_floating or is_replicated and isinstance(tensor, Replicate)
        if is_whole and owners is None:
            return None
        layout = self._sharding.parameter_layout(full.shape.as_list(), tensor)
        data = Replicate() if is_frozen or is_whole else layout.data
        return dataclasses.replace(layout, data=data, pipe_owners=owners)

    @contextlib.contextmanager
    def summed_on_read(self) -> Iterator[None]:
        """Within it, variables hold a summand of their own on every rank, and read as the sum outside replicas."""
        self._is_summed_on_read = True
        try:
            yield
        finally:
            self._is_summed_on_read = False

    def _share_initial_value(self, kwargs: dict[str, Any], layout: Layout | None) -> None:
        """For strategies of several workers: replaces the initial value by the chief's, or its first owner's."""

    def _initial_spec(self, kwargs: dict[str, Any], pipe_owners: tuple[int, ...] | None) -> tf.Tensor | tf.TensorSpec:
        """Returns what the initial value is; drawn where a rank of this process stores it, else only its shape and dtype."""
        mesh = self._sharding.mesh
        if pipe_owners is not None:
            storing = [rank for rank in self._communicator.local_ranks if mesh.coordinate(rank).pipe in pipe_owners]
            if not storing:
                initial, dtype = kwargs["initial_value"], kwargs.get("dtype")

                def drawn() -> tf.Tensor:
                    return tf.convert_to_tensor(initial() if callable(initial) else initial, dtype)

                drawn = tf.function(drawn, autograph=False).get_concrete_function().outputs[0]
                return tf.TensorSpec(drawn.shape, drawn.dtype)
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
                raise RuntimeError(
                    errors.message(
                        f"Variable {kwargs.get('name')!r} is to be sharded, but it is made inside a `tf.function` from a value "
                        "that only exists when the function runs.",
                        fix="Make it in `strategy.scope()` before the function is called, or from an initializer.",
                    )
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
        name = kwargs.get("name") or "Variable"
        mesh = self._sharding.mesh
        aggregation = kwargs.get("aggregation") or tf.VariableAggregation.NONE
        components = []
        ranks = self._communicator.local_ranks
        for rank in ranks:
            coordinate = mesh.coordinate(rank)
            # `layout.shard` copies: a slice would keep the full value alive as long as the shard.
            with tf.init_scope(), record.stop_recording(), tf.device(mesh.devices[rank]):
                if layout.stores(coordinate):
                    shard = tf.convert_to_tensor(layout.shard(full, coordinate))
                else:
                    shard = tf.zeros([0], kwargs.get("dtype"))
                part = {"initial_value": shard, "name": f"{name}/shard_{rank}"}
                components.append(next_creator(**{**kwargs, **part}))
        groups = None if is_slot else self._parameter_groups
        return ShardedVariable(self._container_strategy(), components, layout, ranks, aggregation, groups)

    def _local_devices(self) -> list[str]:
        return [self._sharding.mesh.devices[rank] for rank in self._communicator.local_ranks]

    # Running

    def _use_merge_call(self) -> bool:
        # In a graph all ranks are traced to the end one by one, and merge calls are not used; eager ranks meet in them.
        return tf.executing_eagerly()

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if isinstance(fn, polymorphic_function.Function):
            return self._as_graph_function(fn)(*(args or ()), **(kwargs or {}))
        if tf.executing_eagerly():
            return self._run_eagerly(fn, args, kwargs)
        fn = autograph.tf_convert(fn, ag_ctx.control_status_ctx())
        graph = tf.compat.v1.get_default_graph()
        plan = self._communicator.new_plan()

        @tf.autograph.experimental.do_not_convert
        def run_rank(*args: Any, **kwargs: Any) -> Any:
            rank = self._communicator.local_ranks[values_util.get_current_replica_id_as_int()]
            program = RankProgram(self._communicator, rank, graph, plan, (args, kwargs))
            program.install(tf.distribute.get_replica_context())
            # When the data have run out, nothing of the step may happen: an optimizer that counts a step on some ranks only
            # (the count needs no data) would from then on scale their updates differently.
            inputs = [leaf for leaf in tf.nest.flatten((args, kwargs), expand_composites=True) if tf.is_symbolic_tensor(leaf)]
            with tf.control_dependencies(inputs):
                outputs = cut_tensors.all_whole(fn(*args, **kwargs))
                program.close(outputs)
            return outputs

        result = mirrored_run.call_for_each_replica(self._container_strategy(), run_rank, args, kwargs)
        plan.check_complete()
        self._check_agreement(plan)
        self.last_plan = plan
        give_back_free_memory()
        return result

    def _run_eagerly(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        plan = CollectivePlan(self._communicator.mesh.world_size, self._communicator.local_ranks)
        meeting = Meeting(self._communicator, self.cross_replica)

        def run_rank(*args: Any, **kwargs: Any) -> Any:
            rank = self._communicator.local_ranks[values_util.get_current_replica_id_as_int()]
            program = EagerProgram(self._communicator, rank, plan, meeting, (args, kwargs))
            program.install(tf.distribute.get_replica_context())
            outputs = cut_tensors.all_whole(fn(*args, **kwargs))
            program.close(outputs)
            return outputs

        result = mirrored_run.call_for_each_replica(self._container_strategy(), run_rank, args, kwargs)
        plan.check_complete()
        self.last_plan = plan
        return result

    def _check_agreement(self, plan: CollectivePlan) -> None:
        """For strategies of several workers: compares the traced program with theirs."""

    def _as_graph_function(self, fn: Any) -> Any:
        """Returns `fn`, a `tf.function`, as one that runs all ranks in one graph."""
        if fn not in self._graph_functions:
            python_function = fn.python_function

            def all_ranks(*args: Any, **kwargs: Any) -> Any:
                return self._call_for_each_replica(python_function, args, kwargs)

            self._graph_functions[fn] = fn._clone(python_function=all_ranks)
        return self._graph_functions[fn]

    @property
    def _num_replicas_in_sync(self) -> int:
        # A replica is a copy of the model: the batch is cut over the data axis only.
        return self._sharding.mesh.data_parallel_size

    # Reductions

    def one_per_replica(self, value: Any) -> Any:
        """Returns the local ranks' values of `value` without those of tensor and pipeline peers.

        Tensor peers have the same. Of a pipeline it is the last rank that has outputs, the loss and metrics.
        """
        mesh = self._sharding.mesh
        if mesh.data_parallel_size == mesh.world_size or not isinstance(value, values.DistributedValues):
            return value
        leads: dict[int, tuple[int, Any]] = {}
        for rank, part in zip(self._communicator.local_ranks, value.values, strict=True):
            coordinate = mesh.coordinate(rank)
            if coordinate.data not in leads or coordinate.pipe > leads[coordinate.data][0]:
                leads[coordinate.data] = (coordinate.pipe, part)
        return values.PerReplica(tuple(part for _, part in leads.values()))

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if not isinstance(value, values.Mirrored):
            value = tf.nest.map_structure(self.one_per_replica, value)
        return super()._reduce_to(reduce_op, value, destinations, options)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        return [self._reduce_to(reduce_op, value, destination, options) for value, destination in value_destination_pairs]

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        return super()._gather_to_implementation(self.one_per_replica(value), destinations, axis, options)

    def _get_cross_device_ops(self, value: Any) -> cross_device_ops.CrossDeviceOps:
        # Between the ranks of a process, in cross-replica code: plain additions, no collective.
        return cross_device_ops.ReductionToOneDevice()

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if where() is Where.NO_RANK:
            return super()._replica_ctx_all_reduce(reduce_op, value, options)
        op = {tf.distribute.ReduceOp.SUM: "sum", tf.distribute.ReduceOp.MEAN: "mean"}[reduce_op]
        return tf.nest.map_structure(lambda tensor: collectives.all_reduce(tensor, "data", reduce_op=op), value)

    # Data

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
        """Every process reads the global batches and keeps the rows of its own data indices."""
        mesh = self._sharding.mesh
        parts = [mesh.coordinate(rank).data for rank in self._communicator.local_ranks]
        cut_already = tf.data.Options()
        cut_already.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return input_util.get_distributed_dataset(
            split_batches(dataset, mesh.data_parallel_size, parts).with_options(cut_already),
            self._input_workers_with_options(options),
            self._container_strategy(),
            input_context=tf.distribute.InputContext(1, 0, mesh.data_parallel_size),
            options=options,
        )

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., tf.data.Dataset], options: Any) -> Any:
        """The function makes the batches of this worker's replicas, one after the other; a replica's ranks get the same one."""
        mesh = self._sharding.mesh
        indices = [mesh.coordinate(rank).data for rank in self._communicator.local_ranks]
        each = len(indices) // len(set(indices))
        workers = mesh.world_size // len(indices)
        pipelines = min(workers, mesh.data_parallel_size)
        pipeline = indices[0] * pipelines // mesh.data_parallel_size
        context = tf.distribute.InputContext(pipelines, pipeline, mesh.data_parallel_size)

        def repeated(_: Any) -> tf.data.Dataset:
            dataset = dataset_fn(context)
            return dataset if each == 1 else dataset.flat_map(lambda *batch: tf.data.Dataset.from_tensors(batch).repeat(each))

        return super()._distribute_datasets_from_function(repeated, options)

    def _experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        mesh = self._sharding.mesh
        contexts = [
            tf.distribute.experimental.ValueContext(mesh.coordinate(rank).data, mesh.data_parallel_size)
            for rank in self._communicator.local_ranks
        ]
        return distribute_utils.regroup([value_fn(context) for context in contexts], always_wrap=True)

    # Updates

    def _replica_ctx_update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        program = rank_program()
        if not isinstance(var, ShardedVariable) or program is None:
            return super()._replica_ctx_update(var, fn, args, kwargs, group)
        component = var.component(program.rank)
        with tf.device(component.device):
            return fn(component, *args, **(kwargs or {}))


class ShardedMirroredExtended(ShardedExtendedMixin, mirrored_strategy.MirroredExtended):
    """The devices of one process."""

    # Two strategies of one process must not share group keys.
    _next_key_base = itertools.count(1)

    def __init__(self, strategy: tf.distribute.Strategy, sharding: MeshConfig):
        strategy._collective_key_base = 1000 * next(self._next_key_base)
        self._setup(sharding)
        super().__init__(strategy, devices=list(sharding.mesh.devices))
