"""What one rank emits while `strategy.run` is traced, or runs in an eager one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tfdist.collectives.instance_keys import KEYS_PER_COLLECTIVE, InstanceKeys
from tfdist.collectives.mailbox import Mailbox
from tfdist.collectives.plan import CollectivePlan, CollectiveRecord
from tfdist.collectives.shared_memory import Exchange
from tfdist.collectives.transport import Transport
from tfdist.mesh import MESH_AXES, DeviceMesh

_PROGRAM = "_tfdist_program"
# Room for all pairs of 350 ranks, twice; keys are int32, so that a process may have 8,000 communicators.
_KEYS_PER_COMMUNICATOR = 1 << 18


# A token counts: odd while its rank runs a program, even between programs. Its upper bits are the program's number while odd.
_COUNT_BITS = 40


class Communicator:
    """A strategy's groups: their keys, and one ordering token per local rank.

    Group keys are global to the cluster and strategies of TensorFlow take 1, 2, ...: ours start high. Each communicator has a
    range of its own, in which a group's number follows from the mesh: workers in different groups must not give them one key.
    Collectives of one rank form one chain on its token, in program order: one token for two ranks, or two ranks that issue in
    different orders on their tokens, would hang.

    Args:
        mesh: all ranks of the job.
        transport: how bytes travel.
        local_ranks: the ranks of this process; None: all.

    Attributes:
        exchanges: the groups of ranks on one machine that meet in memory (see `shared_memory`).
        mailbox: what passes messages of a pipeline to ranks on the same machine, if there are some (see `mailbox`).
        kernel_orders: per group, the order in which the kernels number its members (see `wire`).
        programs: what was traced, by number; only kept where other workers take part.
    """

    _next_key_range = itertools.count(1 << 20, _KEYS_PER_COMMUNICATOR)

    def __init__(self, mesh: DeviceMesh, transport: Transport, local_ranks: Sequence[int] | None = None):
        self.mesh = mesh
        self.transport = transport
        self.local_ranks = tuple(range(mesh.world_size) if local_ranks is None else local_ranks)
        self.kernel_orders: dict[tuple[int, ...], list[int]] = {}
        self.exchanges: dict[tuple[int, ...], Exchange] = {}
        self.mailbox: Mailbox | None = None
        self.programs: list[CollectivePlan] = []
        self.instance_keys = InstanceKeys()
        self._first_key = next(self._next_key_range)
        groups = [group for mesh_axis in MESH_AXES for group in mesh.groups(mesh_axis)]
        groups.append(self.first_ranks)
        self._group_numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        self._tokens: dict[int, tf.Variable] = {}
        self._edge_tokens: dict[int, tf.Variable] = {}

    @property
    def is_multi_worker(self) -> bool:
        return len(self.local_ranks) < self.mesh.world_size

    def group_key(self, ranks: tuple[int, ...]) -> int:
        """Returns the key of the group of `ranks`, the same on every call and every worker.

        The groups are those of the mesh, that of the workers' first ranks, and pairs.
        """
        number = self._group_numbers.get(ranks)
        return self._pair_key(*ranks) if number is None else self._first_key + number

    def edge_key(self, source: int, destination: int) -> int:
        """Returns the key of the group in which `source` sends to `destination`: not that of the pair, nor of the way back."""
        return self._pair_key(source, destination) + self.mesh.world_size**2

    def _pair_key(self, first: int, second: int) -> int:
        return self._first_key + len(self._group_numbers) + first * self.mesh.world_size + second

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of every worker, this one's among them; workers have equally many ranks."""
        return tuple(range(0, self.mesh.world_size, len(self.local_ranks)))

    def token(self, rank: int) -> tf.Tensor:
        """Returns the resource handle on which `rank`'s collectives are chained."""
        return self._made(self._tokens, rank).handle

    def edge_token(self, rank: int) -> tf.Tensor:
        """Returns the resource handle that every message of `rank` to a pipeline peer writes when it has left."""
        return self._made(self._edge_tokens, rank).handle

    def _made(self, tokens: dict[int, tf.Variable], rank: int) -> tf.Variable:
        if rank not in tokens:
            # `ResourceVariable` itself, because `tf.Variable` would ask the active strategy, which mirrors it.
            with tf.init_scope(), tf.device(self.mesh.devices[rank]):
                tokens[rank] = resource_variable_ops.ResourceVariable(tf.zeros([], tf.int64), trainable=False)
        return tokens[rank]

    def new_plan(self) -> CollectivePlan:
        """Returns the plan of a new trace."""
        plan = CollectivePlan(self.mesh.world_size, self.local_ranks)
        if self.is_multi_worker:
            self.programs.append(plan)
        return plan

    def running(self) -> dict[int, tuple[int, CollectivePlan]]:
        """Returns, per local rank that is running collectives at this moment, a count of its programs so far and the plan.

        The same count a while later means that the rank is still in the same program. For another thread to call, while training
        runs; known for jobs of several workers only.
        """
        found = {}
        for rank, token in list(self._tokens.items()):
            number, count = divmod(int(token.numpy()), 1 << _COUNT_BITS)
            if count % 2:
                found[rank] = (count, self.programs[number])
        return found


class CollectiveOnTrialError(Exception):
    """A collective stands in what is traced on trial: see `RankProgram.on_trial`."""


class RankProgram:
    """One rank's part of one trace of `strategy.run`.

    It knows the rank's place, hands out keys through the plan that all ranks of the trace share, and lets higher levels
    attach state that lives as long as the trace (`attachment`), act before a collective is emitted (`before_collective`) and
    when the rank's function has returned (`at_close`).

    Attributes:
        graph: the graph in which `strategy.run` was called; collectives are emitted in it, never inside control flow.
        is_on_cpu: whether its device is one.
        is_eager: whether it runs outside any `tf.function` (see `EagerProgram`): collectives then run when they are called.
        arguments: what the rank's function is called with, any structure.
    """

    is_eager = False

    def __init__(self, communicator: Communicator, rank: int, graph: tf.Graph, plan: CollectivePlan, arguments: Any = ()):
        self.communicator = communicator
        self.mesh = communicator.mesh
        self.transport = communicator.transport
        self.rank = rank
        self.local_index = communicator.local_ranks.index(rank)
        self.device = self.mesh.devices[rank]
        self.is_on_cpu = tf.DeviceSpec.from_string(self.device).device_type == "CPU"
        self.graph = graph
        self.plan = plan
        self.arguments = arguments
        self.before_collective: list[Callable[[], None]] = []
        self.at_close: list[Callable[[Any], None]] = []
        self._is_marked = False
        self._is_on_trial = False
        self._branches: list[tf.Graph] = []
        self._attachments: dict[type, Any] = {}
        self._constants: dict[Any, tf.Tensor] = {}

    def attachment(self, kind: type) -> Any:
        """Returns this trace's one `kind(program)`, made on first use."""
        if kind not in self._attachments:
            self._attachments[kind] = kind(self)
        return self._attachments[kind]

    def group_ranks(self, mesh_axis: str) -> tuple[int, ...]:
        """Returns the ranks of this rank's group along `mesh_axis`."""
        return self.mesh.group_ranks(mesh_axis, self.rank)

    def begin(
        self, op: str, x: tf.Tensor | tf.TensorSpec, ranks: tuple[int, ...], label: str, source: int | None = None
    ) -> dict[str, Any]:
        """Registers one collective and returns the attributes that every collective op takes."""
        if self._is_on_trial:
            raise CollectiveOnTrialError(f"{op} {label!r} on trial")
        for callback in self.before_collective:
            callback()
        record = CollectiveRecord(op, ranks, tuple(x.shape.as_list()), x.dtype.name, label, source)
        self.plan.add(self.rank, record)
        self._mark_start()
        return self._attributes(record, self.communicator.group_key(ranks), tf.shape(x) if None in record.shape else None)

    def begin_edge(self, spec: tf.TensorSpec, shape: Any, source: int, destination: int, label: str) -> dict[str, Any]:
        """Registers one message of a pipeline and returns the attributes of the operation that sends or receives it.

        Args:
            spec: static shape, with None for a number of rows that is known at run time only, and dtype.
            shape: the shape, as far as needed a tensor.
            source, destination: ranks.
            label: what it is for; no two messages of a step between these ranks have the same.
        """
        record = self._register_edge(spec, source, destination, label)
        return self._attributes(record, self.communicator.edge_key(source, destination), shape)

    def begin_mail(self, spec: tf.TensorSpec, source: int, destination: int, label: str) -> int:
        """Registers one message of a pipeline that passes through a `Mailbox`, and returns its key; arguments as `begin_edge`."""
        return self.communicator.instance_keys.key(self._register_edge(spec, source, destination, label))

    def _register_edge(self, spec: tf.TensorSpec, source: int, destination: int, label: str) -> CollectiveRecord:
        record = CollectiveRecord("edge", (source, destination), tuple(spec.shape.as_list()), spec.dtype.name, label, source)
        self.plan.add_edge(self.rank, record)
        self._mark_start()
        return record

    def _attributes(self, record: CollectiveRecord, group_key: int, shape: Any) -> dict[str, Any]:
        instance_key = self.communicator.instance_keys.key(record)
        if None in record.shape:
            # A key is bound to one shape for the life of the process: every power of two has its own.
            instance_key += log2_ceiling(shape[record.shape.index(None)])
        return {
            "group_size": self.constant(len(record.ranks)),
            "group_key": self.constant(group_key),
            "instance_key": instance_key,
            "communication_hint": self.transport.hint,
            "timeout_seconds": self.transport.timeout_seconds,
        }

    def constant(self, value: int | Sequence[int] | Sequence[Sequence[int]]) -> Any:
        """Returns `value` as an int32 tensor that all operations of this rank share.

        A deep model has thousands of collectives and reshapes, and a constant for each would be a third of its graph. Inside a
        loop or a branch of the rank's function it returns `value` as it is.
        """
        if tf.compat.v1.get_default_graph() is not self.graph:
            return value
        key = repr(value)
        if key not in self._constants:
            with tf.control_dependencies(None), tf.device(self.device):
                self._constants[key] = tf.constant(value, tf.int32)
        return self._constants[key]

    def token(self) -> tf.Tensor:
        return self.communicator.token(self.rank)

    def cond(self, predicate: tf.Tensor, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        """`tf.cond` whose branches may hold collectives: `predicate` must be the same on all ranks of every group in them."""

        def branch(function: Callable[[], Any]) -> Callable[[], Any]:
            def traced() -> Any:
                self._branches.append(tf.compat.v1.get_default_graph())
                try:
                    return function()
                finally:
                    self._branches.pop()

            return traced

        return tf.cond(predicate, branch(true_fn), branch(false_fn))

    def exists_here(self, x: tf.Tensor) -> bool:
        """Whether `x` was made where all ranks run, not in a branch, a loop or a nested function of one rank's function."""
        return self.is_eager or x.graph is self.graph

    @contextlib.contextmanager
    def outermost(self) -> Iterator[None]:
        """Makes operations where all ranks run, also from within a branch, a loop or a nested function."""
        with contextlib.ExitStack() as stack:
            if not self.is_eager:
                stack.enter_context(self.graph.as_default())
            stack.enter_context(tf.device(self.device))
            yield

    @contextlib.contextmanager
    def on_trial(self) -> Iterator[None]:
        """Within it a collective raises `CollectiveOnTrialError`, and is not in the plan: what is traced may be dropped."""
        before, self._is_on_trial = self._is_on_trial, True
        try:
            yield
        finally:
            self._is_on_trial = before

    def may_emit_here(self) -> bool:
        """Whether the code being traced stands where all ranks run it: not in a loop or a branch of one rank's function."""
        if self.is_eager:
            return tf.executing_eagerly()
        return tf.compat.v1.get_default_graph() in (self.graph, *self._branches[-1:])

    def close(self, outputs: Any) -> None:
        """Runs the `at_close` callbacks; `outputs` is what the rank's function returned."""
        for callback in self.at_close:
            callback(outputs)
        if self._is_marked:
            self._count(-1)

    # Marks on the token, before the program's first collective and after its last, tell a watching thread that the rank is in it.
    def _mark_start(self) -> None:
        if self.communicator.is_multi_worker and not self._is_marked:
            self._is_marked = True
            self._count(1)

    def _count(self, direction: int) -> None:
        number = self.communicator.programs.index(self.plan)
        with self.graph.as_default(), tf.control_dependencies(None), tf.device(self.device):
            # Also where the first collective stands in a branch: of an accumulation, whose other steps send nothing.
            step = tf.constant(1 + direction * (number << _COUNT_BITS), tf.int64)
            tf.raw_ops.AssignAddVariableOp(resource=self.token(), value=step)

    def install(self, replica_context: tf.distribute.ReplicaContext) -> None:
        """Makes this the program of `replica_context`, which `current_program` finds."""
        setattr(replica_context, _PROGRAM, self)


def log2_ceiling(length: tf.Tensor) -> tf.Tensor:
    """Returns the least k, as int32, with 2**k >= `length`, a positive int32 scalar."""
    powers = tf.constant([1 << k for k in range(KEYS_PER_COLLECTIVE - 1)], tf.int32)
    return tf.reduce_sum(tf.cast(powers < length, tf.int32))


def installed_program(replica_context: tf.distribute.ReplicaContext | None) -> RankProgram | None:
    """Returns the program that was installed in `replica_context`, None if there is none. For `where` alone: ask there."""
    return getattr(replica_context, _PROGRAM, None)
