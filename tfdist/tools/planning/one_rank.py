"""A strategy of which one rank is here: its steps are traced as that rank traces them among all others, and never run."""

import math

import tensorflow as tf

from tfdist.collectives import Communicator, choose_transport
from tfdist.collectives.emission import Emission
from tfdist.collectives.transports.transport import MessageTransport
from tfdist.mesh import DATA_AXES, MESH_AXES
from tfdist.sharding import MeshConfig, ShardingConfig
from tfdist.strategy.extended import ShardedMirroredExtended
from tfdist.strategy.sharded_mixin import ShardedStrategyMixin


class OneRankStrategy(ShardedStrategyMixin, tf.distribute.MirroredStrategy):
    """One rank of a `ShardedStrategy`, or with several hosts of a `MultiWorkerShardedStrategy`, whose other ranks are absent.

    Nothing may run: a collective would wait for ever. So its variables must not have values (`weightless`), or be read.

    Args:
        rank: the rank that is here.
        devices: how many ranks there are.
        config: the settings.
        hosts: on how many machines, with a process each.
        kind: "GPU" or "CPU": what every rank's device is; this machine need not have one.
    """

    def __init__(self, rank: int, devices: int, config: ShardingConfig, *, hosts: int = 1, kind: str = "GPU"):
        each = devices // hosts
        first = rank // each * each
        here = tf.DeviceSpec(job="localhost", replica=0, task=0, device_type=kind)
        names = [here.replace(device_index=other).to_string() for other in range(devices)]
        of_hosts = [other // each for other in range(devices)] if hosts > 1 else []
        self._sharding_config = MeshConfig.over(names, config, of_hosts)
        absent = [other for other in range(first, first + each) if other != rank]
        transport = choose_transport(names, is_multi_worker=hosts > 1)
        communicator = Communicator(self.mesh, transport, [rank], absent)
        self.edges = EdgesToNowhere()
        communicator.message_transports.update(dict.fromkeys(absent, self.edges))
        for mesh_axis in (*MESH_AXES, *DATA_AXES):  # else a group's members would be asked
            ranks = self.mesh.group_ranks(mesh_axis, rank)
            communicator.member_orders[ranks] = list(range(len(ranks)))
        tf.distribute.Strategy.__init__(self, ShardedMirroredExtended(self, self._sharding_config, communicator))


class EdgesToNowhere(MessageTransport):
    """Messages between devices of one process, of which one is here: they would be edges of the graph, and are in no plan.

    What is received has memory from when it could come.

    Attributes:
        passed_bytes: what was sent in all traces.
    """

    def __init__(self) -> None:
        self.passed_bytes = 0

    def send(self, program: Emission, x: tf.Tensor, destination: int, label: str) -> None:
        self.passed_bytes += math.prod(x.shape) * x.dtype.size

    def receive(self, program: Emission, spec: tf.TensorSpec, rows: tf.Tensor, source: int, label: str) -> tf.Tensor:
        sizes = [rows if size is None else size for size in spec.shape]
        return tf.ensure_shape(tf.raw_ops.Empty(shape=sizes, dtype=spec.dtype), spec.shape)
