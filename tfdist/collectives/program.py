"""What one rank emits while `strategy.run` is traced, or runs in an eager one."""

import collections
import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist import temporary
from tfdist.collectives.communicator import Communicator, host_of
from tfdist.collectives.instance_keys import log2_ceiling
from tfdist.collectives.plan import CollectivePlan, CollectiveRecord, Ranks, TensorLike
from tfdist.collectives.step_order import ORDER, NoOrder, OfBranch
from tfdist.graphs import tape
from tfdist.graphs.walks import graphs_here
from tfdist.mesh import are_cpus

if TYPE_CHECKING:
    from tfdist.collectives.branches import Selection
    from tfdist.collectives.transports.transport import Transport

PROGRAM_ATTRIBUTE = "_tfdist_program"  # of a replica context


class NotOnTrialError(Exception):
    """What is traced on trial holds what must not be: see `RankProgram.on_trial`."""


class RankProgram:
    """One rank's part of one trace of `strategy.run`.

    It knows the rank's place, hands out keys through the plan that all ranks of the trace share, and lets higher levels
    attach state that lives as long as the trace (`attachment`), act before a collective is emitted (`before_collective`) and
    when the rank's function has returned (`at_close`).

    A branch (`tf.cond`) that holds collectives has a program of its own, within that of the rank: see `branches`. It has its own
    attachments of the classes that say so (`OfBranch`), and shares all others.

    Attributes:
        graph: the graph in which `strategy.run` was called, or that of the branch; collectives are emitted in it, never inside
            other control flow.
        outer: the program around that of a branch; None: it is the rank's.
        selections: by the graph of each branch that has been traced, what it is a branch of.
        before_branch: called with what branches read from this program's graph, before TensorFlow makes a `tf.cond` of them.
        selected_by: called with a program and what selects a branch of it that may send something, returns that of all rows.
        returned_by: called with a branch's program and what the branch returns, returns that mended where it must be.
        summands: called with a tensor that the user's code gives a collective, return what a rank has of it where it stands for a
            sum over the ranks; None where it does not.
        parameter_reader: what reads sharded parameters, by `read(variable, dtype)`, in the place of the core; None: the core.
        is_on_cpu: whether its device is one.
        is_going_back: whether a tape takes a gradient, of the rank's program.
        is_eager: whether it runs outside any `tf.function` (see `EagerProgram`): collectives then run when they are called.
        arguments: what the rank's function is called with, any structure.
        dealt: the ids of those arguments of which each rank has its own; None: all.
        sizes: the static sizes of the first axes of what the ranks of this process are dealt; None: it has one rank.
        are_sizes_equal: whether these ranks have equal ones.
    """

    is_eager = False

    def __init__(self, communicator: Communicator, rank: int, graph: tf.Graph, plan: CollectivePlan, arguments: Any = ()):
        self.communicator = communicator
        self.mesh = communicator.mesh
        self.rank = rank
        self.local_index = communicator.local_ranks.index(rank)
        self.device = self.mesh.devices[rank]
        self.is_on_cpu = are_cpus([self.device])
        self.graph = graph
        self.plan = plan
        self.arguments = arguments
        self.outer: RankProgram | None = None
        self.parameter_reader: Any = None
        self.is_going_back = False
        self.dealt: set[int] | None = None
        self.sizes: frozenset[int] | None = None
        self.are_sizes_equal = True
        self.selections: dict[tf.Graph, Selection] = {}
        self.before_collective: list[Callable[[], None]] = []
        self.before_branch: list[Callable[[list[tf.Tensor]], object]] = []
        self.selected_by: Callable[[RankProgram, tf.Tensor], tf.Tensor] = lambda program, selector: selector
        self.returned_by: Callable[[RankProgram, tf.Tensor], tf.Tensor] = lambda program, output: output
        self.at_close: list[Callable[[Any], None]] = []
        self.summands: list[Callable[[tf.Tensor], tf.Tensor | None]] = []
        self._is_marked = False
        self._is_on_trial = False
        self._is_draft = False
        self._lane = 0
        self._pieces: collections.Counter[Ranks] = collections.Counter()
        self._branch: tf.Graph | None = None  # of `cond`, that is being traced
        self._trusted: list[tf.Tensor] = []
        self._attachments: dict[Callable[[RankProgram], Any], Any] = {}
        self._constants: dict[Any, tf.Tensor] = {}

    def attachment(self, kind: Callable[["RankProgram"], Any]) -> Any:
        """Returns this trace's one `kind(program)`, made on first use."""
        if self.outer is not None and not (isinstance(kind, type) and issubclass(kind, OfBranch)):
            return self.outer.attachment(kind)
        if kind not in self._attachments:
            self._attachments[kind] = kind(self)
        return self._attachments[kind]

    @property
    def order(self) -> NoOrder:
        """In which order the operations of this trace, or branch, are queued, and its collectives sent."""
        return self.attachment(ORDER.now)

    def is_dealt(self, argument: Any) -> bool:
        """Whether `argument`, one of `arguments`, is this rank's own, and not what all ranks are called with."""
        return self.dealt is None or id(argument) in self.dealt

    def group_ranks(self, mesh_axis: str) -> tuple[int, ...]:
        """Returns the ranks of this rank's group along `mesh_axis`."""
        return self.mesh.group_ranks(mesh_axis, self.rank)

    def transport_of(self, ranks: Ranks) -> "Transport":
        """Returns how the collectives of the group of `ranks` travel."""
        return self.communicator.transport_of(ranks)

    def begin(
        self,
        op: str,
        x: TensorLike,
        ranks: Ranks,
        label: str,
        source: int | None = None,
        rows: tf.Tensor | None = None,
    ) -> Any:
        """Registers one collective and returns its instance key: a tensor where `x` has a size known when it runs only.

        That size is `rows`, an int32 scalar, where `x` is a spec.
        """
        self.not_on_trial(f"{op} {label!r}")
        if self._is_draft:
            return 0
        self.compare_branches(ranks)
        with temporary.attributes(self, _lane=0):  # what they emit has places of its own
            for callback in self.before_collective:
                callback()
        is_summed = source is not None and self.transport_of(ranks).sums_to_move
        record = CollectiveRecord(op, ranks, tuple(x.shape.as_list()), x.dtype.name, label, source, is_summed)
        number = self.plan.add(self.rank, record)
        self.order.note_record(self._lane)
        self.root._mark_start()
        if None not in record.shape:
            return self.communicator.instance_keys.key(record, number if self.has_own_turns(ranks) else self._lane)
        key = self.communicator.instance_keys.key(record)
        # A key is bound to one shape for the life of the process: every power of two has its own.
        if rows is None:
            rows = tf.shape(x)[record.shape.index(None)]  # where `x` is, or all of it would go to the host
        with self.on_host():
            return key + log2_ceiling(rows)

    def begin_message(self, x: TensorLike, source: int, destination: int, label: str) -> int:
        """Registers one message between two ranks, of which this is one; returns its key, as `InstanceKeys.key` does.

        The shape of `x` has None for a number of rows that is known at run time only. No two messages of a step between two
        ranks have the same label.
        """
        if self._is_draft:
            return 0
        record = CollectiveRecord("message", (source, destination), tuple(x.shape.as_list()), x.dtype.name, label, source)
        self.plan.add_message(self.rank, record)
        self.root._mark_start()
        return self.communicator.instance_keys.key(record)

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

    def on_host(self) -> contextlib.AbstractContextManager[None]:
        """Places arithmetic with sizes on the host, where a GPU's rank has them: on the GPU each step of it would be a kernel."""
        return contextlib.nullcontext() if self.is_on_cpu else tf.device(host_of(self.device))

    def has_own_turns(self, ranks: Ranks) -> bool:
        """Whether each collective of the group of `ranks` begins when its input is there, in no order with others.

        See `Transport.has_own_turns`; on all of the process's devices they then begin in one order, whatever it is.
        """
        return not self.is_eager and not self.communicator.is_multi_worker and self.transport_of(ranks).has_own_turns

    def token(self) -> tf.Tensor:
        """Returns the resource handle on which the rank's collectives are chained."""
        return self.communicator.token(self.rank)

    def turn(self, ranks: Ranks, key: Any) -> tf.Tensor:
        """Returns the resource handle on which a collective of `key`, as `begin` returned it, has its turn: the rank's chain.

        With turns of their own those of one key form a chain, and no others: no two calls of a key are under way at once.
        """
        is_own = isinstance(key, int) and self.has_own_turns(ranks)
        return self.communicator.turn(self.rank, key) if is_own else self.communicator.token(self.rank, self._lane)

    def in_next_lane(self, ranks: Ranks, lanes: int) -> contextlib.AbstractContextManager[None]:
        """Within it a collective of `ranks` stands on one of several chains, which the group takes in turns.

        See the note on lanes in `transports.chunked`. The lane is part of its key, so that no two of one key are under way at
        once. All members count the same in a trace, as they run the same collectives of the group.
        """
        if self.is_eager:
            return contextlib.nullcontext()
        self._pieces[ranks] += 1
        return temporary.attributes(self, _lane=(self._pieces[ranks] - 1) % lanes)

    def cond(self, predicate: tf.Tensor, true_fn: Callable[[], None], false_fn: Callable[[], None] | None = None) -> None:
        """`tf.cond` whose branches may hold collectives: `predicate` must be the same on all ranks of every group in them."""

        def traced(function: Callable[[], None] | None) -> tf.Tensor:
            with temporary.attributes(self, _branch=tf.compat.v1.get_default_graph()):
                if function is not None:
                    function()
            return tf.constant(True)

        self.trust(predicate)
        tf.cond(predicate, lambda: traced(true_fn), lambda: traced(false_fn))

    def trust(self, selector: tf.Tensor) -> None:
        """Lets branches by `selector` be entered as they are: it is the same on all ranks."""
        self.root._trusted.append(selector)

    @property
    def root(self) -> "RankProgram":
        """The rank's program, of which this is, or is that of a branch."""
        return self if self.outer is None else self.outer.root

    def innermost(self) -> "RankProgram":
        """Returns the program of what is traced here: of the innermost branch that has one, or the rank's."""
        root = self.root
        for graph in self._branches_here():
            if graph in root.selections[graph].programs:
                return root.selections[graph].programs[graph]
        return root

    def _branches_here(self) -> Iterator[tf.Graph]:
        """Yields the branches that may hold collectives, from the innermost on, that what is traced here stands in."""
        root = self.root
        if root.selections:
            inside = itertools.takewhile(lambda graph: graph is not root.graph, graphs_here())
            yield from (graph for graph in inside if graph in root.selections)

    def here(self) -> "RankProgram | None":
        """Returns the program that may emit collectives right here, that of a branch made if it must be.

        None: in a loop, or a nested `tf.function`, of one rank's function.
        """
        program = self.innermost()
        if program.may_emit_here():
            return program
        graph = tf.compat.v1.get_default_graph()
        selection = None if self.is_eager else self.root.selections.get(graph)
        return None if selection is None else selection.program_of(graph)

    def is_recorded_here(self) -> bool:
        """Whether a branch is traced here around which tapes record: nothing that is sent in it has a way back."""
        selection = self.root.selections.get(tf.compat.v1.get_default_graph())
        return selection is not None and selection.is_recorded

    def with_way_back(self) -> "RankProgram":
        """Returns the innermost program whose messages tapes go back through: this one, or around a branch that tapes record."""
        found = self
        while found.outer is not None and self.root.selections[found.graph].is_recorded:
            found = found.outer
        return found

    def of_traced(self, branch: tf.Graph) -> "RankProgram | None":
        """Returns the program of a branch; None: it has needed none."""
        selection = self.root.selections.get(branch)
        return None if selection is None else selection.programs.get(branch)

    def has_sent_in(self, operation: tf.Operation) -> bool:
        """Whether `operation` is a `tf.cond`, or a `tf.switch_case`, in a branch of which collectives stand."""
        branches = tape.traced_branches(operation) if operation.type in tape.BRANCHES else ()
        return any(branch in self.root.selections and self.root.selections[branch].has_sent for branch in branches)

    def compare_branches(self, ranks: Ranks) -> None:
        """Lets the branches that this stands in be entered only where all `ranks` enter them; sends nothing a second time."""
        for branch in self._branches_here():
            self.root.selections[branch].compare(ranks)

    def of_branch(self, branch: tf.Graph) -> "RankProgram":
        """Returns a program for a branch of this one."""
        inner = copy.copy(self)
        inner.outer, inner.graph = self, branch
        inner.before_collective, inner.before_branch, inner.at_close, inner.summands = [], [], [], []
        inner._branch, inner._attachments, inner._constants = None, {}, {}
        inner._is_marked = False
        return inner

    def may_branch_here(self, selector: tf.Tensor) -> bool:
        """Whether a branch by `selector` may hold collectives that are compared: not one of `cond`."""
        graph, root = tf.compat.v1.get_default_graph(), self.root
        return (graph is root.graph or graph in root.selections) and not any(selector is trusted for trusted in root._trusted)

    def and_around(self) -> Iterator["RankProgram"]:
        """Yields this program, and those around it, the rank's last."""
        program: RankProgram | None = self
        while program is not None:
            yield program
            program = program.outer

    def that_made(self, x: tf.Tensor) -> "RankProgram | None":
        """Returns the program in whose graph `x` was made, this one or one around it; None: neither."""
        return next((one for one in self.and_around() if x.graph is one.graph), None)

    def exists_here(self, x: tf.Tensor) -> bool:
        """Whether `x` was made where all ranks run, not in a branch, a loop or a nested function of one rank's function."""
        return self.is_eager or x.graph is self.graph

    @contextlib.contextmanager
    def outermost(self) -> Iterator[None]:
        """Makes operations where all ranks run, also from within a branch, a loop or a nested function."""
        with contextlib.nullcontext() if self.is_eager else self.graph.as_default(), tf.device(self.device):
            yield

    def on_trial(self, *, is_on: bool = True) -> contextlib.AbstractContextManager[None]:
        """Within it `not_on_trial` raises, and no collective is in the plan: what is traced may be dropped.

        With `is_on=False` what is made `outermost` within such a block, and stays, may hold collectives.
        """
        return temporary.attributes(self.root, _is_on_trial=is_on)

    def not_on_trial(self, what: str) -> None:
        """Raises `NotOnTrialError` in a block `on_trial`: for what only the graph of the step can hold, such as a collective."""
        if self.root._is_on_trial:
            raise NotOnTrialError(f"{what} on trial")

    def draft(self) -> "RankProgram":
        """Returns the program of what is traced to be thrown away: of its collectives the plan knows nothing."""
        draft = copy.copy(self)
        draft._is_draft = True
        draft._attachments, draft._constants = {}, {}
        draft.before_collective, draft.at_close, draft.summands = [], [], []
        draft.outer = None
        return draft

    def may_emit_here(self) -> bool:
        """Whether the code being traced stands where all ranks run it: not in a loop or a branch of one rank's function."""
        if self.is_eager:
            return tf.executing_eagerly()
        return tf.compat.v1.get_default_graph() in (self.graph, self._branch)

    def summand(self, x: tf.Tensor) -> tf.Tensor:
        """Returns what a rank gives a collective that the user's code calls with `x`: of a gradient, the rank's own."""
        made_by = self if self.is_eager or not tf.is_symbolic_tensor(x) else self.that_made(x)
        found = None if made_by is None else next((y for one in made_by.summands if (y := one(x)) is not None), None)
        return x if found is None else found

    def summand_made_here(self, x: Any) -> Any:
        """Returns what stands for `x` where the function traced in this graph returns it: a gradient is the rank's own."""
        return self.summand(x) if tf.is_symbolic_tensor(x) and self.exists_here(x) else x

    def close(self, outputs: Any) -> list[tf.Operation]:
        """Runs the `at_close` callbacks; `outputs` is what the rank's function returned.

        Returns the operations that note the end. Who can stop the graph because of an output lets that wait for them: else a
        program would seem to run that has been stopped.
        """
        for callback in self.at_close:
            callback(outputs)
        self.order.join()
        return [self._mark(ends=True)] if self._is_marked else []

    # Marks on the chain, before the program's first collective and after its last, tell a watching thread that the rank is in it.
    def _mark_start(self) -> None:
        if self.communicator.is_multi_worker and not self._is_marked:
            self._is_marked = True
            self._mark(ends=False)

    def _mark(self, *, ends: bool) -> tf.Operation:
        inputs = tf.nest.flatten(self.arguments, expand_composites=True)
        inputs = [leaf for leaf in inputs if tf.is_symbolic_tensor(leaf) and leaf.graph is self.graph]
        # In the graph of all ranks, also where the first collective stands in a branch: of an accumulation, whose other steps
        # send nothing. When the data have run out, nothing of the step happens, and so the rank is not in it.
        with self.graph.as_default(), tf.control_dependencies(None), tf.control_dependencies(inputs), tf.device(self.device):
            return self.communicator.mark_running(self.rank, self.plan, ends=ends)

    def install(self, replica_context: tf.distribute.ReplicaContext) -> None:
        """Makes this the program of `replica_context`, which `current_program` finds."""
        setattr(replica_context, PROGRAM_ATTRIBUTE, self)
