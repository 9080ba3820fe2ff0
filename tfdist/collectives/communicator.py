"""The groups of a strategy: their keys, the transport of each, and the ordering tokens of each local rank."""

import collections
import functools
import itertools
import threading
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tfdist.collectives.instance_keys import InstanceKeys
from tfdist.collectives.plan import CollectivePlan, Ranks
from tfdist.graphs.calls import around_calls
from tfdist.mesh import DATA_AXES, MESH_AXES, DeviceMesh
from tfdist.runtime import Turns

# Room for all pairs of 350 ranks, twice; keys are int32, so that a process may have 8,000 communicators.
_KEYS_PER_COMMUNICATOR = 1 << 18


class MessageCarrier:
    """The settings of a `MessageTransport`, asked for before it carries anything."""

    # Whether messages stand on the chain of the rank's collectives, in program order, as `send` and `receive` do. Then the ranks
    # must all take part in them in one order: none may be received later than in its turn.
    is_in_order = False
    holds_thread = False  # whether to receive holds one of the threads that run operations until the message is there


class Carrier:
    """The settings of a `Transport`, asked for before it carries anything."""

    hint: str  # `communication_hint` of TensorFlow's kernels, where they move bytes
    messages: MessageCarrier  # how messages between two ranks travel that have no other way
    holds_thread = False  # whether a collective holds one of the threads that run operations until all members have come
    # Whether collectives within one process begin when their input is there, in an order that the transport makes the same on all
    # devices. Else, and between processes, they stand on the chain of the rank, in program order.
    has_own_turns = False
    sums_to_move = False  # whether broadcasts, and messages that stand on the chain, are all-reduces
    waits_for_queue = False  # whether a collective waits for all that its device has queued when it begins

    def exchanges(self, communicator: "Communicator", ranks: Ranks) -> bool:
        """Whether `ranks` have an all-to-all; where they do not, all gather what each has for each."""
        return True


class Communicator:
    """A strategy's groups.

    Group keys are global to the cluster and strategies of TensorFlow take 1, 2, ...: ours start high. Each communicator has a
    range of its own, in which a group's number follows from the mesh: workers in different groups must not give them one key.
    Collectives of one rank form one chain on its token, in program order: one token for two ranks, or two ranks that issue in
    different orders on their tokens, would hang. Within a process NCCL's have turns of their own (`transports.kernels`); what
    travels between processes by gRPC forms several chains (`transports.chunked`).

    Args:
        mesh: all ranks of the job.
        transport: how bytes travel, where a group or a pair of ranks has no transport of its own.
        local_ranks: the ranks of this process; None: all.
        absent_ranks: other ranks of this process, which nobody traces. The trace is then for looking at: it
            would hang if it ran.
    """

    _next_key_range = itertools.count(1 << 20, _KEYS_PER_COMMUNICATOR)

    def __init__(
        self,
        mesh: DeviceMesh,
        transport: Carrier,
        local_ranks: Sequence[int] | None = None,
        absent_ranks: Sequence[int] = (),
    ):
        self.mesh = mesh
        self.transport = transport
        self.local_ranks = tuple(range(mesh.world_size) if local_ranks is None else local_ranks)
        self.process_ranks = (*self.local_ranks, *absent_ranks)
        # Of groups that have one of their own, set when the strategy is made; and the same for messages, by the other rank.
        self.transports: dict[Ranks, Carrier] = {}
        self.message_transports: dict[int, MessageCarrier] = {}
        self.member_orders: dict[Ranks, list[int]] = {}  # see `transports.member_order`
        self.programs: list[CollectivePlan] = []  # what was traced; only kept where other workers take part
        self.turns: Turns | None = None  # of threads, where other workers take part
        self.instance_keys = InstanceKeys()
        self._first_key = next(self._next_key_range)
        self._lock = threading.Lock()  # of several threads that trace, one makes a token
        groups = [group for mesh_axis in (*MESH_AXES, *DATA_AXES) for group in mesh.groups(mesh_axis)]
        groups.append(self.first_ranks)
        self._group_numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        self._tokens: dict[int, dict[int, tf.Variable]] = {}  # by lane and rank
        self._turns: dict[tuple[int, int], tf.Tensor] = {}
        self._message_tokens: dict[int, tf.Variable] = {}
        self._marks: dict[str, dict[int, tf.Variable]] = {}
        self._running: dict[int, tf.Variable] = {}  # the number of each rank's program
        self._started: dict[int, tf.Variable] = {}  # how many each has started
        self._completed: dict[int, dict[int, tf.Variable]] = {}  # how often each has come to the end of one, by its number

    def turn_at_calls(self, plan: CollectivePlan) -> None:
        """Lets each call of what is traced here, a program in which all workers have a part, take a turn: see `Turns`."""
        if self.turns is not None:
            around_calls(functools.partial(self.turns.taken, plan), key=self.turns)

    @property
    def is_multi_worker(self) -> bool:
        return len(self.process_ranks) < self.mesh.world_size

    def transport_of(self, ranks: Ranks) -> Carrier:
        """Returns how the collectives of the group of `ranks` travel."""
        return self.transports.get(ranks, self.transport)

    def group_key(self, ranks: Ranks) -> int:
        """Returns the key of the group of `ranks`, the same on every call and every worker.

        The groups are those of the mesh, that of the workers' first ranks, and pairs.
        """
        number = self._group_numbers.get(ranks)
        return self._pair_key(*ranks) if number is None else self._first_key + number

    def message_key(self, source: int, destination: int) -> int:
        """Returns the key of the group in which `source` sends to `destination`: not that of the pair, nor of the way back."""
        return self._pair_key(source, destination) + self.mesh.world_size**2

    def _pair_key(self, first: int, second: int) -> int:
        return self._first_key + len(self._group_numbers) + first * self.mesh.world_size + second

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of every worker, this one's among them; workers have equally many ranks."""
        return tuple(range(0, self.mesh.world_size, len(self.local_ranks)))

    def token(self, rank: int, lane: int = 0) -> tf.Tensor:
        """Returns the resource handle on which `rank`'s collectives are chained, those of one lane: see `transports.chunked`."""
        return self._made(self._tokens.setdefault(lane, {}), rank).handle

    def turn(self, rank: int, key: int) -> tf.Tensor:
        """Returns the resource handle on which `rank`'s collectives of the instance key `key` are chained: of no variable."""
        if (rank, key) not in self._turns:
            name = f"tfdist/turn_{self._first_key}_{rank}_{key}"
            with tf.init_scope(), tf.device(self.mesh.devices[rank]):
                self._turns[rank, key] = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=name)
        return self._turns[rank, key]

    def message_token(self, rank: int) -> tf.Tensor:
        """Returns the resource handle that every message of `rank` to or from another process writes when it has moved."""
        return self._made(self._message_tokens, rank).handle

    def _made(self, tokens: dict[int, tf.Variable], rank: int, *, on_host: bool = False) -> tf.Variable:
        with self._lock:
            if rank not in tokens:
                device = self.mesh.devices[rank]
                # `ResourceVariable` itself, because `tf.Variable` would ask the active strategy, which mirrors it.
                with tf.init_scope(), tf.device(host_of(device) if on_host else device):
                    tokens[rank] = resource_variable_ops.ResourceVariable(tf.zeros([], tf.int64), trainable=False)
            return tokens[rank]

    def mark_on_host(self, rank: int, operations: Sequence[tf.Operation], kind: str) -> tf.Operation:
        """Emits an operation on the host that runs when `rank`'s device has done `operations`, and all that it had queued before.

        It counts in a variable that nobody reads: TensorFlow's optimizers would make an operation without an effect an edge past
        the host. Those of one `kind` write the same one, and so run in the order in which they are emitted.
        """
        mark = self._made(self._marks.setdefault(kind, {}), rank, on_host=True)
        with tf.device(mark.device):
            one = tf.constant(1, tf.int64)
            with tf.control_dependencies(list(operations)):
                return tf.raw_ops.AssignAddVariableOp(resource=mark.handle, value=one)

    def new_plan(self, name: str = "") -> CollectivePlan:
        """Returns the plan of a new trace; `name` is that of the program, if it has the same on all workers that run it."""
        plan = CollectivePlan(self.mesh.world_size, self.local_ranks, self.mesh.hosts)
        plan.name = name
        if self.is_multi_worker:
            self.programs.append(plan)
        return plan

    def mark_running(self, rank: int, plan: CollectivePlan, *, ends: bool = False) -> tf.Operation:
        """Emits the operation that notes that `rank` runs the program of `plan` from here on, or that it `ends` here.

        It stands on the rank's chain: after the collectives before it, and before those after it.
        """
        # On the host: to read a GPU's variable is to wait for all that the GPU has queued, while a watch asks whether it hangs.
        started = self._made(self._started, rank, on_host=True).handle  # first: the watch looks for it where `running` is there
        running = self._made(self._running, rank, on_host=True).handle
        number = 1 + self.programs.index(plan)
        completed = self._made(self._completed.setdefault(number, {}), rank, on_host=True).handle

        def step_on_chain() -> tf.Operation:
            lanes = [tokens[rank].handle for tokens in self._tokens.values() if rank in tokens]
            with tf.control_dependencies([tf.raw_ops.ReadVariableOp(resource=lane, dtype=tf.int64) for lane in lanes]):
                return tf.raw_ops.AssignAddVariableOp(resource=self.token(rank), value=tf.constant(1, tf.int64))

        def note() -> tf.Operation:
            with tf.device(self._running[rank].device):
                now = tf.constant(0 if ends else number, tf.int64)
                assigned = tf.raw_ops.AssignVariableOp(resource=running, value=now)
                one = tf.constant(1, tf.int64)  # here too: the token's would be copied from the GPU
                counted = tf.raw_ops.AssignAddVariableOp(resource=completed if ends else started, value=one)
                return tf.group(assigned, counted)

        first, second = (step_on_chain, note) if ends else (note, step_on_chain)
        with tf.control_dependencies([first()]):
            return second()

    def running(self) -> dict[int, tuple[int, CollectivePlan]]:
        """Returns, per local rank that is running collectives at this moment, a count of its programs so far and the plan.

        The same count a while later means that the rank is still in the same program. For another thread to call, while training
        runs; known for jobs of several workers only.
        """
        found = {}
        for rank, running in list(self._running.items()):
            count, number = _read_there(self._started[rank]), _read_there(running)
            if number:
                found[rank] = (count, self.programs[number - 1])
        return found

    def completed(self) -> dict[str, int]:
        """Returns how often all local ranks have come to the end of each program that has a name. For another thread, too."""
        found: collections.Counter[str] = collections.Counter()
        for number, variables in list(self._completed.items()):
            if name := self.programs[number - 1].name:
                found[name] += min(map(_read_there, list(variables.values())), default=0)
        return found


def _read_there(variable: tf.Variable) -> int:
    """Reads a scalar where it is: else a GPU, where there is one, copies it."""
    with tf.device(variable.device):
        return int(variable.numpy())


def host_of(device: str) -> str:
    """Returns the CPU of the process that has `device`: of a GPU; a CPU is its own."""
    spec = tf.DeviceSpec.from_string(device)
    return device if spec.device_type == "CPU" else spec.replace(device_type="CPU", device_index=0).to_string()
