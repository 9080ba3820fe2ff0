"""`tfdist.MultiWorkerShardedStrategy`: the devices of several machines, one process each."""

import dataclasses
import itertools
import pickle
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.collectives import SAME_HOST, Communicator, choose_transport
from tfdist.mesh import worker_devices
from tfdist.runtime import Cluster, Coordination, FailureWatch, Turns, Watched, coordination, read_cluster, share_cores
from tfdist.sharding import MeshConfig, ShardingConfig, settings_of
from tfdist.sharding.compression import Compressor
from tfdist.strategy.extended import ShardedMirroredExtended
from tfdist.strategy.multi_worker_extended import ShardedCollectiveExtended
from tfdist.strategy.sharded_mixin import ShardedStrategyMixin, takes_settings

# What one worker may do while the others wait for it outside of steps: write a large model, prepare a data set.
_SLOWEST_SECONDS = 3600.0


@takes_settings
class MultiWorkerShardedStrategy(ShardedStrategyMixin, tf.distribute.MultiWorkerMirroredStrategy):
    """Trains a Keras model on the devices of several workers without keeping a copy of everything on each.

    As `ShardedStrategy`, over all devices of all workers of a TF_CONFIG job. Every worker runs the same program:

        strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=3)   # first: before any tensor or dataset
        with strategy.scope():
            model = build_model()
            model.compile(optimizer=keras.optimizers.AdamW(3e-4), loss="sparse_categorical_crossentropy")
        model.fit(dataset, callbacks=[keras.callbacks.BackupAndRestore("/shared/backup")])

    * `dataset` is batched with the global batch size and the same on every worker; each worker trains on its own rows of every
      global batch, so that the result is that of one device. Random orders are seeded alike on all workers.
    * Initial values are the chief's (the first worker's), sent one variable at a time.
    * Reading a variable outside `strategy.run` is a collective: every worker calls `save`, `get_weights` and the like. Only the
      chief writes files.
    * A worker that dies or raises ends the others within seconds, with a message that names it; a step that another worker does
      not join is refused before it runs.

    Without TF_CONFIG, or with one worker in it, it trains on the devices of this process.

    The mistake to avoid: code that only one worker runs and that reads or trains the model, such as
    `if chief: model.save(...)`. Call it everywhere.

    Args:
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver`; None reads TF_CONFIG.
        communication_options: `tf.distribute.experimental.CommunicationOptions`: `bytes_per_pack` replaces `bucket_bytes`,
            `implementation` RING keeps workers of one machine from sharing memory and GPUs from NCCL, NCCL asks for it,
            `timeout_seconds` replaces `step_timeout_seconds`; None chooses all.
        config: the settings as one object; None: their defaults. Settings given by name replace those of `config`.
        rendezvous_timeout_seconds: how long to wait for the other workers to start.
        step_timeout_seconds: how long a step, or another worker's part in a collective, may take before the job is ended.
        peer_timeout_seconds: how long another worker may be silent, because it is stopped, or its machine or the network is gone,
            before the job is ended. A worker whose process ends is noticed at once.
        ...: the settings

    Raises:
        ValueError: an argument or TF_CONFIG is malformed, or the workers differ in their settings or numbers of devices.
        TypeError: an argument is not the name of a setting.
        RuntimeError: the worker's port is in use, TensorFlow is already initialised, or workers do not arrive in time.

    Source: ZeRO, Rajbhandari et al. 2020.
    """

    # Two strategies of one process must not share group keys of TensorFlow's own collectives, nor keys of the key-value store.
    _serials = itertools.count(1)
    _watch: FailureWatch | None = None

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        *,
        config: ShardingConfig | None = None,
        rendezvous_timeout_seconds: float = 300.0,
        step_timeout_seconds: float = 600.0,
        peer_timeout_seconds: float = 30.0,
        **settings: Any,
    ):
        timeouts: dict[str, Any] = {
            "rendezvous_timeout_seconds": rendezvous_timeout_seconds,
            "step_timeout_seconds": step_timeout_seconds,
            "peer_timeout_seconds": peer_timeout_seconds,
        }
        for name, value in timeouts.items():
            errors.check_seconds(name, value)
        config = settings_of(config, settings)
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        if not hasattr(options, "bytes_per_pack"):
            raise errors.value_error(
                "`communication_options` must be `tf.distribute.experimental.CommunicationOptions` or None.",
                communication_options=communication_options,
            )
        cluster = read_cluster(cluster_resolver)
        kind, number = worker_devices()
        if cluster is not None and kind == "CPU":
            share_cores(number * cluster.num_workers_here)
        tasks = [task.device for task in cluster.tasks] if cluster else ["/job:localhost/replica:0/task:0"]
        devices = [f"{task}/device:{kind}:{index}" for task in tasks for index in range(number)]
        self._cluster = cluster
        self._step_timeout_seconds = options.timeout_seconds or step_timeout_seconds
        self._peer_timeout_seconds = peer_timeout_seconds
        config = dataclasses.replace(config, bucket_bytes=options.bytes_per_pack or config.bucket_bytes)
        hosts = [host for host in cluster.hosts for _ in range(number)] if cluster else []
        self._sharding_config = MeshConfig.over(devices, config, hosts)
        resolver = cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
        implementation = getattr(options.implementation, "value", options.implementation)
        transport = choose_transport(self.mesh.devices, implementation, cluster is not None)
        # Not MultiWorkerMirroredStrategy.__init__, which makes its own extended.
        if cluster is None:
            extended = ShardedMirroredExtended(self, self._sharding_config, Communicator(self.mesh, transport))
            extended.step_timeout_seconds = self._step_timeout_seconds
            extended._cluster_resolver = resolver  # where `self.cluster_resolver` looks for it
            tf.distribute.Strategy.__init__(self, extended)
            return
        first = cluster.worker_index * number
        communicator = Communicator(self.mesh, transport, range(first, first + number))
        serial = next(self._serials)
        self._collective_key_base = 1000 * serial
        server_runs = coordination.is_started()
        if server_runs and MultiWorkerShardedStrategy._watch is None:
            raise errors.runtime_error(
                "Another strategy, such as `tf.distribute.MultiWorkerMirroredStrategy`, has made this process a worker already: "
                "its servers have other settings, and nobody watches the other workers.",
                fix="Make the tfdist strategy first; another strategy may be made after it.",
            )
        watch = None if server_runs else FailureWatch(cluster, SAME_HOST.now.abort, peer_timeout_seconds)
        try:
            if watch is not None:
                coordination.configure(cluster, rendezvous_timeout_seconds, peer_timeout_seconds)
                watch.start(rendezvous_timeout_seconds)
                MultiWorkerShardedStrategy._watch = watch
            with coordination.starting_servers():
                extended = ShardedCollectiveExtended(
                    self, self._sharding_config, communicator, cluster, resolver, options, server_runs
                )
        except (tf.errors.OpError, TimeoutError) as error:
            if watch is not None:
                watch.close()
            raise RuntimeError(_not_met(cluster, rendezvous_timeout_seconds, str(error).splitlines()[0])) from error
        if watch is not None:
            watch.servers_run = True
        tf.distribute.Strategy.__init__(self, extended)
        self._meet(f"strategy_{serial}", rendezvous_timeout_seconds, shares_memory=implementation != "RING")

    @property
    def cluster(self) -> Cluster | None:
        """The workers; None for a job of one."""
        return self._cluster

    def _meet(self, name: str, timeout_seconds: float, shares_memory: bool) -> None:
        """Waits for all workers, compares their settings, and starts to watch them."""
        watch = MultiWorkerShardedStrategy._watch
        communicator = self.extended.communicator
        self._coordination = Coordination(self._cluster, name, watch)
        each = len(communicator.local_ranks)
        watch.watched.append(Watched(communicator, self._coordination, self._step_timeout_seconds, each))
        communicator.turns = Turns(self._coordination)  # which hears others from before they meet
        mine = self._settings()
        try:
            answers = self._coordination.all_gather("hello", mine, timeout_seconds)
        except coordination.NoAnswerError as error:
            message = _not_met(self._cluster, timeout_seconds, str(error))
            watch.report(message, error.missing[0])
            raise RuntimeError(message) from error
        for task, theirs in zip(self._cluster.tasks, answers, strict=True):
            for name, value in mine.items():
                if theirs.get(name) != value:
                    raise errors.value_error(
                        f"Workers must have the same settings: `{name}` is {value!r} on {self._cluster.task}, but "
                        f"{theirs.get(name)!r} on {task}.",
                        fix="Start the same program with the same arguments, and as many devices, on every worker.",
                    )
        coordination.seed_if_unseeded()
        self.extended.connect(self._coordination, self._step_timeout_seconds, shares_memory)

    def _settings(self) -> dict[str, Any]:
        config, mesh = self._sharding_config, self.mesh
        each = mesh.world_size // self._cluster.num_workers
        kind = tf.DeviceSpec.from_string(mesh.devices[0]).device_type
        settings = {name: _as_json(value) for name, value in config.settings().items()}
        return {
            "devices per worker": f"{each} {kind}",
            **settings,
            "peer_timeout_seconds": self._peer_timeout_seconds,
            "cluster": [str(task) for task in self._cluster.tasks],
            "TensorFlow version": tf.__version__,
            "Keras version": keras.__version__,
        }

    def reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        """As `tf.distribute.Strategy.reduce`, also of structures, as Keras calls it; `axis` of a scalar is ignored."""

        def reduce_one(leaf: Any) -> Any:
            part = leaf.values[0] if isinstance(leaf, tf.distribute.DistributedValues) else leaf
            is_scalar = getattr(getattr(part, "shape", None), "rank", None) == 0
            return super(MultiWorkerShardedStrategy, self).reduce(reduce_op, leaf, None if is_scalar else axis)

        return tf.nest.map_structure(reduce_one, value)

    def share(self, name: str, value: str) -> str:
        if self._cluster is None:
            return value
        timeout_seconds = max(self._step_timeout_seconds, _SLOWEST_SECONDS)
        return self._coordination.meet(name, value, timeout_seconds)[0]

    def from_chief(self, value: Any) -> Any:
        if self._cluster is None:
            return value
        packed = pickle.dumps(value) if self._cluster.is_chief else b""
        size = int(self.share("a value of the first worker's", str(len(packed))))
        padded = packed.ljust(1 << max(size - 1, 0).bit_length(), b"\0")  # few sizes: each is a program that is kept
        sent = self.extended.cross_replica.from_chief(tf.io.decode_raw(padded, tf.uint8))
        return value if self._cluster.is_chief else pickle.loads(sent.numpy().tobytes()[:size])


def _not_met(cluster: Cluster, timeout_seconds: float, reason: str) -> str:
    return errors.message(
        f"{cluster.task} has waited for the other workers, but the cluster is not complete: {reason}.",
        rendezvous_timeout_seconds=timeout_seconds,
        cluster=[str(task) for task in cluster.tasks],
        fix="Start the program on every worker of the cluster; look at the logs of those that are missing; check that the "
        "addresses can be reached.",
    )


def _as_json(setting: Any) -> Any:
    """Returns the value of a setting as workers compare it."""
    if isinstance(setting, Compressor):
        return repr(setting)
    return setting.name if isinstance(setting, tf.DType) else setting
