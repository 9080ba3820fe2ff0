"""The program of one rank, while `strategy.run` is traced or runs eagerly, and those of the branches in it."""

import abc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist import temporary
from tfdist.collectives.communicator import Communicator
from tfdist.collectives.emission import Emission
from tfdist.collectives.parts import OF_EXTENSIONS, Part
from tfdist.collectives.plan import CollectivePlan, Ranks
from tfdist.collectives.results import Results
from tfdist.collectives.step_order import ORDER, NoOrder
from tfdist.graphs import tape
from tfdist.graphs.walks import graphs_here

PROGRAM_ATTRIBUTE = "_tfdist_program"  # of a replica context


class BranchPoint(abc.ABC):
    """A `tf.cond`, or a `tf.case`, of a rank's function that may hold collectives: what a program asks of it (`branches`).

    Attributes:
        is_recorded: whether tapes record around it: what is sent in a branch has no way back to them.
        programs: those of the branches that have one, by their graphs.
    """

    is_recorded: bool
    programs: "dict[tf.Graph, RankProgram]"

    @property
    @abc.abstractmethod
    def has_sent(self) -> bool:
        """Whether collectives stand in a branch."""

    @abc.abstractmethod
    def program_of(self, branch: tf.Graph) -> "RankProgram | None":
        """Returns the program of a branch, made on first use; None in a place where no program may stand."""

    @abc.abstractmethod
    def compare(self, ranks: Ranks) -> None:
        """Lets the branches be entered only where all `ranks` enter the same one; sends nothing a second time."""


class RankProgram(Emission):
    """One rank's part of one trace of `strategy.run`.

    A branch (`tf.cond`) that holds collectives has a program of its own, within that of the rank: see `branches`. It has its own
    parts of the kinds that say so (`OfBranch`), and shares all others.

    Attributes:
        order: in which order the operations of this trace, or branch, are queued, and its collectives sent.
        branch_points: by the graph of each branch that has been traced, what it is a branch of.
        trusted: of the rank's program, what selects a branch, and is known to be the same on all ranks.
        selected_by: called with a program and what selects a branch of it that may send something, returns that of all rows.
        returned_by: called with a branch's program and what the branch returns, returns that mended where it must be.
        parameter_reader: what reads sharded parameters, by `read(variable, dtype)`, in the place of the core; None: the core.
        is_going_back: whether a tape takes a gradient, of the rank's program.
        dealt: the ids of those arguments of which each rank has its own; None: all.
        sizes: the static sizes of the first axes of what the ranks of this process are dealt; None: it has one rank.
        are_sizes_equal: whether these ranks have equal ones.
    """

    def __init__(self, communicator: Communicator, rank: int, graph: tf.Graph, plan: CollectivePlan, arguments: Any = ()):
        super().__init__(communicator, rank, graph, plan, arguments)
        self.parameter_reader: Any = None
        self.is_going_back = False
        self.dealt: set[int] | None = None
        self.sizes: frozenset[int] | None = None
        self.are_sizes_equal = True
        self.branch_points: dict[tf.Graph, BranchPoint] = {}
        self.selected_by: Callable[[RankProgram, tf.Tensor], tf.Tensor] = lambda program, selector: selector
        self.returned_by: Callable[[RankProgram, tf.Tensor], tf.Tensor] = lambda program, output: output
        self._branch: tf.Graph | None = None  # of `cond`, that is being traced
        self.trusted: list[tf.Tensor] = []
        self.order: NoOrder
        self.begin_with(*OF_EXTENSIONS, Results)

    def begin_with(self, *kinds: type[Part]) -> None:
        self.order = ORDER.now(self)
        super().begin_with(*kinds)

    def is_dealt(self, argument: Any) -> bool:
        """Whether `argument`, one of `arguments`, is this rank's own, and not what all ranks are called with."""
        return self.dealt is None or id(argument) in self.dealt

    def note_record(self, lane: int) -> None:
        self.order.note_record(lane)

    # Branches

    def cond(self, predicate: tf.Tensor, true_fn: Callable[[], None], false_fn: Callable[[], None] | None = None) -> None:
        """`tf.cond` whose branches may hold collectives: `predicate` must be the same on all ranks of every group in them."""

        def traced(function: Callable[[], None] | None) -> tf.Tensor:
            with temporary.attributes(self, _branch=tf.compat.v1.get_default_graph()):
                if function is not None:
                    function()
            return tf.constant(True)

        self.root.trusted.append(predicate)
        tf.cond(predicate, lambda: traced(true_fn), lambda: traced(false_fn))

    def may_branch_here(self, selector: tf.Tensor) -> bool:
        """Whether a branch by `selector` may hold collectives that are compared: not one of `cond`."""
        graph, root = tf.compat.v1.get_default_graph(), self.root
        return (graph is root.graph or graph in root.branch_points) and not any(selector is one for one in root.trusted)

    def innermost(self) -> "RankProgram":
        """Returns the program of what is traced here: of the innermost branch that has one, or the rank's."""
        root = self.root
        for graph in self._branches_here():
            if graph in root.branch_points[graph].programs:
                return root.branch_points[graph].programs[graph]
        return root

    def _branches_here(self) -> Iterator[tf.Graph]:
        """Yields the branches that may hold collectives, from the innermost on, that what is traced here stands in."""
        root = self.root
        if root.branch_points:
            inside = itertools.takewhile(lambda graph: graph is not root.graph, graphs_here())
            yield from (graph for graph in inside if graph in root.branch_points)

    def here(self) -> "RankProgram | None":
        """Returns the program that may emit collectives right here, that of a branch made if it must be.

        None: in a loop, or a nested `tf.function`, of one rank's function.
        """
        program = self.innermost()
        if program.may_emit_here():
            return program
        graph = tf.compat.v1.get_default_graph()
        branch_point = None if self.is_eager else self.root.branch_points.get(graph)
        return None if branch_point is None else branch_point.program_of(graph)

    def may_emit_here(self) -> bool:
        """Whether the code being traced stands where all ranks run it: not in a loop or a branch of one rank's function."""
        if self.is_eager:
            return tf.executing_eagerly()
        return tf.compat.v1.get_default_graph() in (self.graph, self._branch)

    def is_recorded_here(self) -> bool:
        """Whether a branch is traced here around which tapes record: nothing that is sent in it has a way back."""
        branch_point = self.root.branch_points.get(tf.compat.v1.get_default_graph())
        return branch_point is not None and branch_point.is_recorded

    def with_way_back(self) -> "RankProgram":
        """Returns the innermost program whose messages tapes go back through: this one, or around a branch that tapes record."""
        found = self
        while found.outer is not None and self.root.branch_points[found.graph].is_recorded:
            found = found.outer
        return found

    def of_traced(self, branch: tf.Graph) -> "RankProgram | None":
        """Returns the program of a branch; None: it has needed none."""
        branch_point = self.root.branch_points.get(branch)
        return None if branch_point is None else branch_point.programs.get(branch)

    def has_sent_in(self, operation: tf.Operation) -> bool:
        """Whether `operation` is a `tf.cond`, or a `tf.switch_case`, in a branch of which collectives stand."""
        branches = tape.traced_branches(operation) if operation.type in tape.BRANCHES else ()
        return any(one in self.root.branch_points and self.root.branch_points[one].has_sent for one in branches)

    def compare_branches(self, ranks: Ranks) -> None:
        """Lets the branches that this stands in be entered only where all `ranks` enter them; sends nothing a second time."""
        for branch in self._branches_here():
            self.root.branch_points[branch].compare(ranks)

    def of_branch(self, branch: tf.Graph) -> "RankProgram":
        """Returns a program for a branch of this one."""
        inner = self.of_graph(self, branch)
        inner._branch = None
        return inner

    def and_around(self) -> Iterator["RankProgram"]:
        """Yields this program, and those around it, the rank's last."""
        program: RankProgram | None = self
        while program is not None:
            yield program
            program = program.outer

    def that_made(self, x: tf.Tensor) -> "RankProgram | None":
        """Returns the program in whose graph `x` was made, this one or one around it; None: neither."""
        return next((one for one in self.and_around() if x.graph is one.graph), None)

    # What a rank has of sums

    def summand(self, x: tf.Tensor) -> tf.Tensor:
        """Returns what a rank gives a collective that the user's code calls with `x`: of a gradient, the rank's own."""
        made_by = self if self.is_eager or not tf.is_symbolic_tensor(x) else self.that_made(x)
        parts = () if made_by is None else made_by.parts
        return next((found for part in parts if (found := part.summand(x)) is not None), x)

    def summand_made_here(self, x: Any) -> Any:
        """Returns what stands for `x` where the function traced in this graph returns it: a gradient is the rank's own."""
        return self.summand(x) if tf.is_symbolic_tensor(x) and self.exists_here(x) else x

    def close(self, outputs: Any) -> list[tf.Operation]:
        """Lets every part do what is left; `outputs` is what the rank's function returned.

        Returns the operations that note the end. Who can stop the graph because of an output lets that wait for them: else a
        program would seem to run that has been stopped.
        """
        for part in self.parts:
            part.close(outputs)
        self.order.join()
        return self.ended()

    def install(self, replica_context: tf.distribute.ReplicaContext) -> None:
        """Makes this the program of `replica_context`, which `current_program` finds."""
        setattr(replica_context, PROGRAM_ATTRIBUTE, self)
