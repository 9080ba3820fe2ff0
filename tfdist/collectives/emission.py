"""The emissions of one rank: collectives, each with its key and its turn, in the graph of its step."""

import collections
import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any, Self, TypeVar

import tensorflow as tf

from tfdist import temporary
from tfdist.collectives.communicator import Communicator
from tfdist.collectives.instance_keys import log2_ceiling
from tfdist.collectives.parts import OfBranch, Part
from tfdist.collectives.plan import CollectivePlan, CollectiveRecord, Ranks, TensorLike
from tfdist.collectives.rank import Rank

P = TypeVar("P", bound=Part)


class NotOnTrialError(Exception):
    """Code that is traced on trial holds a collective: see `Emission.on_trial`."""


class Emission(Rank):
    """The emissions of one rank in one trace, or in a branch of it, and the parts of its state (`collectives.parts`).

    Attributes:
        graph: the graph in which `strategy.run` was called, or that of the branch; collectives are emitted in it, never inside
            other control flow.
        outer: the program around that of a branch; None: it is the rank's.
        is_eager: whether it runs outside any `tf.function` (see `EagerProgram`): collectives then run when they are called.
        arguments: what the rank's function is called with, any structure.
        watched_groups: groups in which gradients may be sent: of what a tape watches, or from one rank to another.
    """

    is_eager = False

    def __init__(self, communicator: Communicator, rank: int, graph: tf.Graph, plan: CollectivePlan, arguments: Any = ()):
        super().__init__(communicator, rank)
        self.graph = graph
        self.plan = plan
        self.arguments = arguments
        self.outer: Self | None = None
        self.watched_groups: set[Ranks] = set()
        self._is_marked = False
        self._is_on_trial = False
        self._is_draft = False
        self._lane = 0
        self._pieces: collections.Counter[Ranks] = collections.Counter()
        self._constants: dict[Any, tf.Tensor] = {}
        self._parts: dict[type[Part], Part] = {}

    # Parts

    def make(self, *kinds: type[Part]) -> None:
        """Makes the parts of these `kinds`, in this order; a branch has its own of those that are `OfBranch`."""
        for kind in kinds:
            if self.outer is None or issubclass(kind, OfBranch):
                self._parts[kind] = kind(self)  # type: ignore[call-arg]

    def begin_with(self, *kinds: type[Part]) -> None:
        """Makes the first parts of a program that is new."""
        self.make(*kinds)

    def part(self, kind: type[P]) -> P:
        """Returns the part of this `kind`. Raises KeyError where the program has none: an eager rank has no `Facts`, say."""
        if self.outer is not None and not issubclass(kind, OfBranch):
            return self.outer.part(kind)
        return self._parts[kind]  # type: ignore[return-value]

    @property
    def parts(self) -> Sequence[Part]:
        """The program's own parts, in the order in which they were made."""
        return tuple(self._parts.values())

    def settle(self) -> None:
        """Does what must be done before the next collective is emitted."""
        for part in self.parts:
            part.settle()

    @property
    def root(self) -> Self:
        """The rank's program, of which this is, or is that of a branch."""
        return self if self.outer is None else self.outer.root

    # Collectives

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
            self.settle()
        is_summed = source is not None and self.transport_of(ranks).sums_to_move
        record = CollectiveRecord(op, ranks, tuple(x.shape.as_list()), x.dtype.name, label, source, is_summed)
        number = self.plan.add(self.rank, record)
        self.note_record(self._lane)
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

    def compare_branches(self, ranks: Ranks) -> None:
        """Lets the branches that this stands in be entered only where all `ranks` enter them."""

    def note_record(self, lane: int) -> None:
        """Notes that a collective has been put in the plan, which travels on this lane of the rank's tokens."""

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

    # Turns

    def has_own_turns(self, ranks: Ranks) -> bool:
        """Whether each collective of the group of `ranks` begins when its input is there, in no order with others.

        See `Carrier.has_own_turns`; on all of the process's devices they then begin in one order, whatever it is.
        """
        return not self.is_eager and not self.communicator.is_multi_worker and self.transport_of(ranks).has_own_turns

    def turn(self, ranks: Ranks, key: Any) -> tf.Tensor:
        """Returns the resource handle on which a collective of `key`, as `begin` returned it, has its turn: the rank's chain.

        With turns of their own those of one key form a chain, and no others: no two calls of a key are under way at once.
        """
        is_own = isinstance(key, int) and self.has_own_turns(ranks)
        return self.communicator.turn(self.rank, key) if is_own else self.communicator.token(self.rank, self._lane)

    def in_next_lane(self, ranks: Ranks, lanes: int) -> contextlib.AbstractContextManager[None]:
        """Within it a collective of `ranks` stands on one of several chains, which the group takes one after the other.

        See the note on lanes in `transports.chunked`. The lane is part of its key, so that no two of one key are under way at
        once. All members count the same in a trace, as they run the same collectives of the group.
        """
        if self.is_eager:
            return contextlib.nullcontext()
        self._pieces[ranks] += 1
        return temporary.attributes(self, _lane=(self._pieces[ranks] - 1) % lanes)

    # Where operations are made

    @contextlib.contextmanager
    def outermost(self) -> Iterator[None]:
        """Makes operations where all ranks run, also from within a branch, a loop or a nested function."""
        with contextlib.nullcontext() if self.is_eager else self.graph.as_default(), tf.device(self.device):
            yield

    def exists_here(self, x: tf.Tensor) -> bool:
        """Whether `x` was made where all ranks run, not in a branch, a loop or a nested function of one rank's function."""
        return self.is_eager or x.graph is self.graph

    # What is not in the plan

    def on_trial(self, *, is_on: bool = True) -> contextlib.AbstractContextManager[None]:
        """Within it `not_on_trial` raises, and no collective is in the plan: what is traced may be dropped.

        With `is_on=False` what is made `outermost` within such a block, and stays, may hold collectives.
        """
        return temporary.attributes(self.root, _is_on_trial=is_on)

    def not_on_trial(self, what: str) -> None:
        """Raises `NotOnTrialError` in a block `on_trial`: for what only the graph of the step can hold, such as a collective."""
        if self.root._is_on_trial:
            raise NotOnTrialError(f"{what} on trial")

    def draft(self) -> Self:
        """Returns the program of what is traced to be thrown away: of its collectives the plan knows nothing."""
        draft = self.of_graph(None, self.graph)
        draft._is_draft = True
        draft.watched_groups = set()
        return draft

    def of_graph(self, outer: Self | None, graph: tf.Graph) -> Self:
        """Returns a program like this one for `graph`, within `outer`, with new parts of the same kinds."""
        inner = copy.copy(self)
        inner.outer, inner.graph = outer, graph
        inner._is_marked, inner._constants, inner._parts = False, {}, {}
        inner.begin_with(*self.root._parts)
        return inner

    def ended(self) -> list[tf.Operation]:
        """Returns the operations that note that the program, if it has a collective, has come to its end."""
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
