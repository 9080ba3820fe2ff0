"""The `StrategyExtended` of `MultiWorkerShardedStrategy`: what stands on values in this process, made to span workers."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy, distribute_utils, mirrored_strategy, values

from tfdist import errors
from tfdist.collectives import (
    NCCL,
    SAME_HOST,
    CollectivePlan,
    Communicator,
    PlanAgreement,
    find_member_orders,
    make_groups,
)
from tfdist.data import comparison, parts, signature
from tfdist.data.tables import digests_of_tables
from tfdist.runtime import Cluster, Coordination
from tfdist.sharding import Layout, MeshConfig
from tfdist.strategy import double_sums
from tfdist.strategy.extended import ShardedExtendedMixin


class ShardedCollectiveExtended(ShardedExtendedMixin, collective_all_reduce_strategy.CollectiveAllReduceExtended):
    """The devices of all workers; `_worker_devices` are this worker's.

    `server_runs` where this process has become a worker for an earlier strategy.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        sharding: MeshConfig,
        communicator: Communicator,
        cluster: Cluster,
        cluster_resolver: Any,
        communication_options: Any,
        server_runs: bool,
    ):
        self._cluster = cluster
        self._setup(sharding, communicator)
        self._std_server_started = server_runs
        super().__init__(strategy, cluster_resolver, communication_options)

    def connect(self, store: Coordination, timeout_seconds: float, shares_memory: bool) -> None:
        """Once all workers have met: chooses the groups' transports, and lets traced steps and datasets be compared."""
        self._coordination = store
        self._compared_datasets = itertools.count()
        self._timeout_seconds = timeout_seconds
        each = len(self.communicator.local_ranks)
        self._agreement = PlanAgreement(store, self.communicator.instance_keys, timeout_seconds, each)
        find_member_orders(self.communicator)
        mesh = self.communicator.mesh
        message_axis = "pipe" if mesh.pipeline_parallel_size > 1 else None
        SAME_HOST.now.connect(self.communicator, store, timeout_seconds, is_wanted=shares_memory, message_axis=message_axis)
        self._check_compression()

    # Devices

    def _update_config_proto(self, config_proto: Any) -> Any:
        """Returns how this worker's server runs collectives: with NCCL where the devices do.

        A kernel's own hint is not enough. The worker that leads a group is asked about a collective without it, looks for a ring,
        and fails for a reduce-scatter, of which there is none.
        """
        config = super()._update_config_proto(config_proto)
        config.experimental.collective_nccl = self.communicator.transport is NCCL
        return config

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        devices = self._local_devices()
        return tuple(devices), tf.DeviceSpec.from_string(devices[0]).device_type

    # Variables

    def _share_initial_value(self, kwargs: dict[str, Any], layout: Layout | None) -> None:
        owners = layout.pipe_owners if layout is not None else None
        value = self._initial_spec(kwargs, owners)
        spec = f"{value.dtype.name}{value.shape.as_list()}"
        (chiefs,) = self._coordination.meet("the creation of a variable", spec, self._timeout_seconds, with_chief_only=True)
        if chiefs != spec:
            name, tasks = kwargs.get("name") or "Variable", self._cluster.tasks
            self._coordination.fail(
                f"Workers make different variables: {name!r} is {spec} on {self._cluster.task}, but {chiefs} on {tasks[0]}."
            )
        if owners is None:
            kwargs["initial_value"] = self.cross_replica.from_chief(value)
        elif isinstance(value, tf.Tensor):
            kwargs["initial_value"] = self.cross_replica.from_first_owner(value, owners)

    # Shared already, by `_share_initial_value`: on this worker it only has to be copied to the other devices.
    _get_variable_creator_initial_value = mirrored_strategy.MirroredExtended._get_variable_creator_initial_value

    # Running

    def _check_agreement(self, plan: CollectivePlan) -> None:
        plan.notes += [f"a lookup table of digest {x}" for x in digests_of_tables(tf.compat.v1.get_default_graph())]
        self._agreement.check(plan)
        if self.communicator.transport is NCCL:
            make_groups(self.communicator, plan)

    # Reductions over all workers, from cross-replica code

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        reduce_op = double_sums.as_reduced(reduce_op, self.one_per_replica(value), self._container_strategy())
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if isinstance(value, values.Mirrored) and mean:
            return value
        parts = self._parts(value)
        if parts is None:  # one value of this worker, not one per device
            total = self.cross_replica.sum_over_workers(tf.convert_to_tensor(value))
            return total / tf.cast(self._num_workers, total.dtype) if mean else total
        return self._everywhere(self.cross_replica.all_reduce(parts, "mean" if mean else "sum"), destinations)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        parts = self._parts(value)
        if parts is None:
            parts = [tf.convert_to_tensor(value)] * len(self.worker_devices)
        return self._everywhere(self.cross_replica.all_gather(parts, axis), destinations)

    def _parts(self, value: Any) -> Sequence[tf.Tensor] | None:
        """Returns the values of the local devices; None for a value that is not one per device."""
        if isinstance(value, values.DistributedValues):
            return [tf.convert_to_tensor(part) for part in value.values]
        return [tf.convert_to_tensor(value)] if len(self.worker_devices) == 1 else None

    def _everywhere(self, results: Sequence[tf.Tensor], destinations: Any) -> Any:
        """Dresses equal results of the local devices as what a reduction to `destinations` returns."""
        if len(results) > 1 and isinstance(destinations, values.DistributedValues):
            return distribute_utils.regroup(tuple(results), wrap_class=values.Mirrored)
        return results[0]

    # Data

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
        """As on one machine, after a comparison of the workers' datasets."""
        if tf.executing_eagerly():
            self._check_same_data(dataset)
        dataset = parts.times_as_long(dataset, dataset)
        distributed = super()._experimental_distribute_dataset(self._compared(dataset), options)
        distributed.given = dataset
        return distributed

    def _compared(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns `dataset`; if Python makes its batches, some are compared with those of other workers when they come."""
        if not tf.executing_eagerly() or not signature.runs_python(dataset):
            return dataset
        number, tasks, here = next(self._compared_datasets), self._cluster.tasks, self._cluster.worker_index

        def tell(iteration: int, batch: int, digest: comparison.Digest) -> None:
            def difference(index: int, theirs: comparison.Digest) -> str:
                return "" if comparison.is_same(digest, theirs) else comparison.difference(batch, tasks[here], tasks[index])

            self._coordination.compare(f"data/{number}/{iteration}/{batch}", digest, difference)

        return comparison.compared(dataset, tell)

    @property
    def names_of_processes(self) -> tuple[str, ...]:
        return tuple(map(str, self._cluster.tasks))

    def tell_all(self, what: str, value: str) -> list[str]:
        if not tf.executing_eagerly():
            return [value] * self.num_processes
        return self._coordination.meet(what, value, self._timeout_seconds)

    def _check_same_data(self, dataset: tf.data.Dataset) -> None:
        """Raises ValueError, on every worker, when the workers would not read the same examples in the same order."""
        mine = signature.dataset_signature(dataset)
        answers = self._coordination.meet("the distribution of a dataset", json.dumps(mine), self._timeout_seconds)
        tasks = self._cluster.tasks
        for index, answer in enumerate(answers):
            different = signature.difference(mine, json.loads(answer))
            if different is not None:
                raise errors.value_error(
                    f"Every worker must be given the same dataset, of which it takes its part, but {tasks[index]} differs "
                    f"from {self._cluster.task}: {different}.",
                    fix="Build it alike on all workers: the same files, global batch size and seeds "
                    "(`keras.utils.set_random_seed`). Data that is split by worker already goes through "
                    "`strategy.distribute_datasets_from_function`.",
                )
        for found, fix in (
            (
                signature.unseeded(mine),
                "Give `shuffle` a seed, or call `keras.utils.set_random_seed` before the dataset is made.",
            ),
            (signature.unordered(mine), "Use `deterministic=True`, the default."),
        ):
            if found:
                raise errors.value_error(
                    f"The dataset's order is not the same on every worker: {found[0]}. Some examples would be trained on "
                    "twice and others not at all.",
                    fix=fix,
                )
