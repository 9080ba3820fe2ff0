"""The `StrategyExtended` of tfdist: what TensorFlow asks of a strategy, answered with sharded variables."""

import contextlib
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.distribute import cross_device_ops, distribute_utils, mirrored_run, mirrored_strategy, values, values_util
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from tfdist import collectives, keras_hooks
from tfdist.collectives import CollectivePlan, Communicator, RankProgram
from tfdist.data import DistributedDataset, DistributedDatasetsFromFunction, EndOfData, parts, split_batches
from tfdist.graphs import tape
from tfdist.keras_layers import randomness
from tfdist.placements import eager
from tfdist.placements.replicas import ReplicaCount
from tfdist.runtime import give_back_free_memory, helping_another, out_of_memory
from tfdist.sharding import MeshConfig, WeightCache
from tfdist.sharding.compression import COMPRESSION
from tfdist.sharding.known_sums import KnownSums
from tfdist.sharding.sharded_activations import WHOLE
from tfdist.strategy import double_sums, shape_errors
from tfdist.strategy.rank_parts import make_parts
from tfdist.strategy.variable_creation import VariableCreation, check_keras


class ShardedExtendedMixin(VariableCreation):
    """The additions of every tfdist strategy to a mirrored one, whatever its transport."""

    def _setup(self, sharding: MeshConfig, communicator: Communicator) -> None:
        check_keras()
        keras_hooks.install()
        self._sharding = sharding
        self.communicator = communicator
        self.cross_replica = collectives.CrossReplica(self.communicator)
        self.weight_cache = WeightCache(sharding.kept_bytes)
        self._graph_functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.last_plan: CollectivePlan | None = None
        self.created = itertools.count()
        self.step_timeout_seconds = 600.0
        self.draws_unsaved = False  # whether a step draws from what no backup has
        # Those that were built for its variables: of each, how many steps are known to be behind it (`checkpoint.unsaved`).
        self.optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def _check_compression(self) -> None:
        """Refuses compression that would send more, once it is known how the groups' bytes travel."""
        if self._sharding.compressor is not None:
            COMPRESSION.now.check_it_pays(self.communicator, self._sharding.compressor, self._sharding.compressing_setting)

    # Running

    def _use_merge_call(self) -> bool:
        # In a graph all ranks are traced to the end one by one, and merge calls are not used; eager ranks meet in them.
        return tf.executing_eagerly()

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        is_function = isinstance(fn, polymorphic_function.Function)
        if self._sharding.mesh.world_size > 1:
            is_compiled = is_function and collectives.nested_functions.is_compiled(fn)
            collectives.nested_functions.check_not_compiled("`strategy.run` is called", is_compiled=is_compiled)
        if is_function:
            return self._as_graph_function(fn)(*(args or ()), **(kwargs or {}))
        communicator = self.communicator
        if tf.executing_eagerly():
            plan = CollectivePlan(communicator.mesh.world_size, communicator.local_ranks, communicator.mesh.hosts)
            eager_program = functools.partial(collectives.EagerProgram, communicator, plan=plan, cross_replica=self.cross_replica)
            try:
                with (
                    self.weight_cache.written(),
                    communicator.turns.taken(plan) if communicator.turns else contextlib.nullcontext(),
                ):
                    return self._run_ranks(fn, args, kwargs, plan, eager_program)
            except tf.errors.ResourceExhaustedError as error:
                out_of_memory.explain(fn, error)
                raise
        fn = autograph.tf_convert(fn, ag_ctx.control_status_ctx())
        args, kwargs = tf.nest.map_structure(_without_static_none, (args, kwargs))
        plan, began = communicator.new_plan(), tape.operations_so_far()
        graph = tf.compat.v1.get_default_graph()
        program_of = functools.partial(RankProgram, communicator, graph=graph, plan=plan)
        collects = gc.isenabled()
        gc.disable()  # a graph is objects that stay, among which Python would look for garbage again and again
        try:
            result = self._run_ranks(fn, args, kwargs, plan, program_of)
        finally:
            gc.enable() if collects else None
        communicator.turn_at_calls(plan)
        collectives.finished_graphs.check_at_call(graph)
        shape_errors.explain_at_calls(self._sharding.mesh, graph)
        if not self.cross_replica.is_multi_worker:
            given = tf.nest.flatten((args, kwargs), expand_composites=True)
            collectives.exclusion.let_wait(began, [x for x in given if tf.is_symbolic_tensor(x)], is_step=True)
            collectives.stalls.end_at_calls(graph, self.step_timeout_seconds)
        self._check_agreement(plan)
        give_back_free_memory()
        return result

    def _run_ranks(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, plan: CollectivePlan, program_of: Callable[..., RankProgram]
    ) -> Any:
        """Traces `fn` for each local rank, or runs it, with the program that `program_of` makes of the rank and its arguments."""
        seeds = plan.shared(randomness.RankSeeds)
        given = tf.nest.flatten((args, kwargs)) if len(self.communicator.local_ranks) > 1 else None
        parts = [x.values for x in given or () if isinstance(x, values.DistributedValues)]
        shapes = [[x.shape for x in of_ranks if tf.is_tensor(x) and x.shape.rank] for of_ranks in parts]

        @tf.autograph.experimental.do_not_convert
        def run_rank(*args: Any, **kwargs: Any) -> Any:
            rank = self.communicator.local_ranks[values_util.get_current_replica_id_as_int()]
            began = tape.operations_so_far()
            program = program_of(rank, arguments=(args, kwargs))
            program.dealt = None if given is None else {id(x) for of_ranks in parts for x in of_ranks}
            if given is not None:
                program.sizes = frozenset(x[0] for of_ranks in shapes for x in of_ranks if x[0] is not None)
                program.are_sizes_equal = all(len({x[0] for x in of_ranks}) < 2 for of_ranks in shapes)
            make_parts(program, self._sharding.gather_rows_bytes)
            program.install(tf.distribute.get_replica_context())
            # When the data have run out, nothing of the step may happen: an optimizer that counts a step on some ranks only
            # (the count needs no data) would from then on scale their updates differently.
            inputs = [leaf for leaf in tf.nest.flatten((args, kwargs), expand_composites=True) if tf.is_symbolic_tensor(leaf)]
            with tf.control_dependencies(inputs), seeds.lent(), eager.watching(program), helping_another():
                outputs = double_sums.agreed(WHOLE.now.all_whole(fn(*args, **kwargs)), program)
                if program.is_eager:  # which knows less at its end
                    double_sums.mark(outputs, program)
                    summands = program.part(KnownSums).own(outputs)
                else:
                    summands = tf.nest.map_structure(program.summand_made_here, outputs)
                program.close(summands)
                if not program.is_eager:
                    double_sums.mark(outputs, program)
            collectives.exempt_from_automatic_order(tape.operations_since(began))
            return summands

        with shape_errors.explaining(self._sharding.mesh):
            result = mirrored_run.call_for_each_replica(self._container_strategy(), run_rank, args, kwargs)
        seeds.take_back()
        self.draws_unsaved |= seeds.has_drawn
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
        # A replica is a copy of the model: the batch is split over the data axis only.
        return ReplicaCount(self._sharding.mesh.data_parallel_size)

    # Reductions

    def one_per_replica(self, value: Any) -> Any:
        """Returns the local ranks' values of `value` without those of tensor and pipeline peers.

        Tensor peers have the same. Of a pipeline it is the last rank that has outputs, the loss and metrics.
        """
        mesh = self._sharding.mesh
        if mesh.data_parallel_size == mesh.world_size or not isinstance(value, values.DistributedValues):
            return value
        leads: dict[int, tuple[int, Any]] = {}
        for rank, part in zip(self.communicator.local_ranks, value.values, strict=True):
            coordinate = mesh.coordinate(rank)
            if coordinate.data not in leads or coordinate.pipe > leads[coordinate.data][0]:
                leads[coordinate.data] = (coordinate.pipe, part)
        return values.PerReplica(tuple(part for _, part in leads.values()))

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if not isinstance(value, values.Mirrored):
            value = tf.nest.map_structure(self.one_per_replica, value)
            reduce_op = double_sums.as_reduced(reduce_op, value, self._container_strategy())
        return super()._reduce_to(reduce_op, value, destinations, options)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        return [self._reduce_to(reduce_op, value, destination, options) for value, destination in value_destination_pairs]

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        return super()._gather_to_implementation(self.one_per_replica(value), destinations, axis, options)

    def _get_cross_device_ops(self, value: Any) -> cross_device_ops.CrossDeviceOps:
        # Between the ranks of a process, in cross-replica code: plain additions, no collective.
        return cross_device_ops.ReductionToOneDevice()

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if collectives.where() is collectives.Where.NO_RANK:
            return super()._replica_ctx_all_reduce(reduce_op, value, options)
        op = {tf.distribute.ReduceOp.SUM: "sum", tf.distribute.ReduceOp.MEAN: "mean"}[reduce_op]
        return tf.nest.map_structure(lambda tensor: collectives.all_reduce(tensor, "data", reduce_op=op), value)

    # Data

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
        """Every process reads the global batches and keeps the rows of its own data indices."""
        mesh = self._sharding.mesh
        indices = [mesh.coordinate(rank).data for rank in self.communicator.local_ranks]
        is_split_already = tf.data.Options()
        is_split_already.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        steps = parts.number_of_batches(dataset)
        distributed = DistributedDataset(
            self._input_workers_with_options(options),
            self._container_strategy(),
            self._read_ahead(split_batches(dataset, mesh.data_parallel_size, indices).with_options(is_split_already), options),
            input_context=tf.distribute.InputContext(1, 0, mesh.data_parallel_size),
            options=options,
        )
        distributed.given = dataset
        # The devices of a process reach the end together, and so do those of others, if every worker knows where it is.
        is_told = steps == parts.UNKNOWN and self.num_processes > 1
        return distributed.end_after(steps, self._ends([0] * self.num_processes) if is_told else None)

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., tf.data.Dataset], options: Any) -> Any:
        """The function makes the batches of this worker's replicas, one after the other; a replica's ranks get the same one."""
        mesh = self._sharding.mesh
        devices = len(self.communicator.local_ranks)
        pipelines = min(self.num_processes, mesh.data_parallel_size)
        firsts = [mesh.coordinate(process * devices).data for process in range(self.num_processes)]
        ends = self._ends([data * pipelines // mesh.data_parallel_size for data in firsts])
        context = tf.distribute.InputContext(pipelines, ends.part, mesh.data_parallel_size)
        each = len({mesh.coordinate(rank).data for rank in self.communicator.local_ranks})

        def own_part(_: Any = None) -> tf.data.Dataset:
            return parts.repeated(dataset_fn(context), devices // each)

        if options is not None and options.experimental_replication_mode == tf.distribute.InputReplicationMode.PER_REPLICA:
            return super()._distribute_datasets_from_function(own_part, options)
        workers = self._input_workers_with_options(options)
        with tf.device(workers.worker_devices[0]):
            dataset = own_part()
            told = self.tell_all("the distribution of a part of the data", parts.description(dataset))
            dataset, steps, ends = parts.as_long_as_others(dataset, told, ends, devices)
            dataset = self._read_ahead(dataset, options)
        distributed = DistributedDatasetsFromFunction(workers, self._container_strategy(), [context], lambda _: dataset, options)
        return distributed.end_after(steps, ends)

    def _read_ahead(self, dataset: tf.data.Dataset, options: Any) -> tf.data.Dataset:
        """Lets the next batch of every device be made ready while they compute."""
        each = 1 if options is None else options.experimental_per_replica_buffer_size
        return dataset.prefetch(each * len(self.communicator.local_ranks)) if each else dataset

    @property
    def num_processes(self) -> int:
        return self._sharding.mesh.world_size // len(self.communicator.local_ranks)

    def _ends(self, parts_of_processes: Sequence[int]) -> EndOfData:
        """Returns how the processes tell each other of the ends of the parts of the data that they read."""
        local_ranks = self.communicator.local_ranks
        return EndOfData(self.names_of_processes, local_ranks[0] // len(local_ranks), tuple(parts_of_processes))

    @property
    def names_of_processes(self) -> tuple[str, ...]:
        return ("this process",)

    def tell_all(self, what: str, value: str) -> list[str]:
        """Returns the `value` of every process, at a point of the program that is named `what`."""
        return [value]

    def _experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        mesh = self._sharding.mesh
        contexts = [
            tf.distribute.experimental.ValueContext(mesh.coordinate(rank).data, mesh.data_parallel_size)
            for rank in self.communicator.local_ranks
        ]
        return distribute_utils.regroup([value_fn(context) for context in contexts], always_wrap=True)


class ShardedMirroredExtended(ShardedExtendedMixin, mirrored_strategy.MirroredExtended):
    """The devices of one process: of the local ranks of `communicator`, by default all."""

    # Two strategies of one process must not share group keys.
    _next_key_base = itertools.count(1)

    def __init__(self, strategy: tf.distribute.Strategy, sharding: MeshConfig, communicator: Communicator | None = None):
        strategy._collective_key_base = 1000 * next(self._next_key_base)
        mesh = sharding.mesh
        self._setup(sharding, communicator or Communicator(mesh, collectives.choose_transport(mesh.devices)))
        self._check_compression()
        super().__init__(strategy, devices=self._local_devices(), cross_device_ops=self._get_cross_device_ops(None))


def _without_static_none(argument: Any) -> Any:
    """Returns `argument`, of `strategy.run`; if the trace knows of a rank that has no rows, as rows of which it knows no number.

    Sizes of none cannot be told from others, and no index is in them.
    """
    if not isinstance(argument, values.PerReplica) or not all(tf.is_symbolic_tensor(x) for x in argument.values):
        return argument
    rows = {x.shape[0] if x.shape.rank else None for x in argument.values}
    if 0 not in rows or rows == {0}:
        return argument
    return values.PerReplica([tf.compat.v1.placeholder_with_default(x, [None, *x.shape[1:]]) for x in argument.values])
