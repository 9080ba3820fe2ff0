"""A step is mended where an operation needs what other ranks have: its inputs are redistributed.

    tf.sqrt(mean)                     the mean of all rows: a message of one number
    tf.where(mean < 1.5, a, b)        the same; a branch, too
    total / count                     both, in one message
    x - mean(x)                       the mean of all rows, and in backward the derivative by it, which each rank has a part of
    total + mean                      nothing is sent: a rank's sum, over its weight, is a mean
    x @ transposed(x), x[::-1]        the rows of all ranks are gathered, if they are few enough

What is wanted is asked for by its name (`known`): a loss, a log, a value that is assigned. A number that goes back to rows is
mended as soon as it is seen (`look`), in front of any message that may depend on it.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import OfBranch, RankProgram, all_reduce, can_be_gathered
from tfdist.graphs import records, tape, walks
from tfdist.placements.eager import EagerFacts, facts_of
from tfdist.placements.facts import Facts
from tfdist.placements.graph_facts import GivenFacts
from tfdist.placements.kinds import How, Partial, Placement, Replicate, Shard, Unknown, Why
from tfdist.placements.opening import Opening
from tfdist.placements.plan import OUTPUT, RepairPlan, Want
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.redistribute import Redistribution
from tfdist.placements.remaking import Remaking
from tfdist.placements.surroundings import reads_variables
from tfdist.placements.table import Linear, is_elementwise, row_of

_MOST_PLANS = 4  # since what is made again may have other static shapes, and then need more


class Repair(OfBranch):
    """Repairs of the graph of one rank's program. A part of its state, and of a branch's.

    Attributes:
        before_known: called with a loss or a log before it is asked what it is of one device.
    """

    def __init__(self, program: RankProgram):
        self._program = program
        self._facts = program.part(Facts)
        self._rows = program.part(RankRows)
        self._redistribution = program.part(Redistribution)
        self._remaking = program.part(Remaking)
        self._plan = program.part(RepairPlan)
        self._given_up: set[str] = set()  # operations that nothing can be done about
        self._looked_for: set[str] = set()  # those that `look` has found once
        self._looked_at = len(program.graph.get_operations())
        self._is_working = False

    def known(self, tensor: tf.Tensor, label: str) -> Placement:
        """Returns the placement of `tensor`, mended if it must be; `Unknown`: that could not be done."""
        if not self._program.exists_here(tensor):
            return Unknown(Why.NO_RULE, f"{tensor.op.type} {tensor.op.name!r}")
        if tape.in_vectorized_map() or self._has_sent_to_one():  # where nothing can be sent; or ranks run different programs
            return self._facts.of(tensor)
        self.look()
        with self.working():
            return self._known(tensor, label)

    def _has_sent_to_one(self) -> bool:
        """Whether the user's code has sent something from one data rank to another."""
        ranks = set(self._program.group_ranks("data"))
        return any(one.op == "send" and ranks.issuperset(one.ranks) for one in self._program.plan.records[self._program.rank])

    def _known(self, tensor: tf.Tensor, label: str, *, may_gather: bool = True) -> Placement:
        tensor = self._remaking.now(tensor)
        found = self._facts.of(tensor)
        if not isinstance(found, Unknown) or found.what in self._given_up:
            return found
        self._know_outside(tensor, label)
        self._program.settle()  # what reads gradients is to read sums of them
        plans = 0
        while plans < _MOST_PLANS:
            waves, lost = self._plan.of(tensor, may_gather)
            for wants in waves:
                self._mend(wants, label, tensor)
            tensor = self._remaking.now(tensor)
            opened = [self._open(op, tensor, label, may_gather) for op in self._facts.reasons_of(tensor)]
            tensor = self._remaking.now(tensor)
            if not any(waves) and not any(opened) or not isinstance(self._facts.of(tensor), Unknown):
                break
            plans += not any(opened)  # of the branches that one asks for there is an end
        if may_gather:
            self._given_up.update(lost)
        return self._facts.of(tensor)

    def _open(self, op: tf.Operation, target: tf.Tensor, label: str, is_asked_for: bool) -> bool:
        goes_back = any(isinstance(x, Unknown) and x.why is Why.GOES_BACK for x in map(self._facts.of, op.outputs))
        with self.working():
            return (is_asked_for or goes_back) and self._program.part(Opening).opened(op, target, label)

    def _know_outside(self, tensor: tf.Tensor, label: str) -> None:
        """Mends what a branch has captured, and what makes `tensor` unknown in it, where that was made."""
        for op in self._facts.reasons_of(tensor) if self._program.outer is not None else ():
            if (outside := self._facts.outside_of(op.outputs[0])) is None:
                continue
            repair, outer = outside[0].part(Repair), outside[1]
            with repair.without_shares(), self._program.outermost():
                repair.known(outer, label)
                self._facts.forget(op.outputs)
                if (now := repair.now(outer)) is not outer:
                    self._remaking.replace(op.outputs[0], tf.identity(now))

    def mended(self, tensor: tf.Tensor, label: str) -> tf.Tensor:
        """Returns what stands in the place of `tensor` when what it is has been asked for."""
        self.known(tensor, label)
        return self.now(tensor)

    def now(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what stands in the place of `tensor`, of own rows, since it was mended: of all rows, which are more."""
        return self._handed_out(tensor, self._remaking.now(tensor))

    def own_rows(self, tensor: tf.Tensor, label: str) -> tf.Tensor:
        """Returns `tensor`, which has the rank's rows first, as they are where rows of all ranks have met in it."""
        now = self._remaking.now(tensor)
        if self.is_agreed(now) and now.shape.rank and now.shape[0] is None and self._facts.own_rows_first(tensor):
            with self.working():
                return self._handed_out(tensor, self._redistribution.own_rows(now, tensor, label))
        return self.now(tensor)

    def _handed_out(self, old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
        """Returns `new`, which is about to be read in the place of `old`: tapes that follow that follow it, too."""
        if new is not old:
            records.record_function([new], [old], lambda upstream: [upstream], "InThePlaceOf")
        return new

    def whole(self, tensor: tf.Tensor, label: str) -> tf.Tensor | None:
        """Returns what `tensor` is on one device, the same on all ranks; None: that is not known."""
        return self.wholes([tensor], label)[0]

    def without_shares(self) -> contextlib.AbstractContextManager[None]:
        """A block in which what is asked for is no loss, in which a loop's share may stand beside what all ranks have."""
        return temporary.attributes(self._plan, bears_shares=False)

    def wholes(self, tensors: Sequence[tf.Tensor], label: str) -> list[tf.Tensor | None]:
        """Returns the same of several: their numbers are in one message."""
        placements = [self.known(x, label) for x in tensors]
        pairs = list(zip(map(self.now, tensors), placements, strict=True))
        with self.working():
            self._redistribution.agree([x for x, p in pairs if isinstance(p, Partial) and self._plan.can_agree(x)], label)
            for x, p in pairs:
                if isinstance(p, Shard) and not p.is_joined and can_be_gathered(x):
                    self._redistribution.gather(x, label)
        return [x if isinstance(p, Replicate) else self._redistribution.found(x) for x, p in pairs]

    def as_whole(self, tensor: tf.Tensor, label: str) -> tf.Tensor:
        """Returns `tensor`, or what ranks have agreed on where it is a number that each has of its own rows."""
        is_number = tensor.dtype.is_floating and isinstance(self.known(tensor, label), Partial)
        whole = self.whole(tensor, label) if is_number else None
        return self.now(tensor) if whole is None else self._handed_out(tensor, whole)

    def without_extremes(self, tensor: tf.Tensor, label: str) -> tf.Tensor:
        """Returns `tensor`, or what ranks have agreed on where it is a maximum or a minimum of each one's rows."""
        placement = self.known(tensor, label)
        whole = self.whole(tensor, label) if isinstance(placement, Partial) and placement.is_extreme else None
        return self.now(tensor) if whole is None else self._handed_out(tensor, whole)

    def as_mean(self, tensor: tf.Tensor, label: str) -> tf.Tensor:
        """Returns `tensor` such that the ranks' own, by their weights, make up what one device has, as far as that is known: of
        integers what one device has."""
        if tensor.dtype.is_integer:
            whole = self.whole(tensor, label)
            return self.now(tensor) if whole is None else whole
        tensor = self.without_extremes(tensor, label)
        placement = self._facts.of(tensor)
        if not (isinstance(placement, Partial) and placement.is_sum):
            return tensor
        weight = self._rows.weight()
        return self._redistribution.make(lambda x, w: tf.math.divide_no_nan(x, tf.cast(w, x.dtype)), tensor, weight)

    def as_share(self, tensor: tf.Tensor, label: str) -> Placement:
        """Returns the placement of `tensor`, a loss of a custom training loop, in which what is agreed on counts once.

        What the same number is added to that ranks have agreed on is a rank's share, as the loop says it; the number becomes one.
        """
        placement = self.known(tensor, label)
        terms = self._terms_of(tensor) if placement == Partial(How.MEAN) else []
        if any(self._facts.is_agreed(x) for op in terms for x in op.inputs):  # means that are added to it are such numbers, too
            names = {op.name for op in terms}
            means = [(op, place) for op in terms for place, x in enumerate(op.inputs) if self._facts.of(x) == placement]
            firsts = [(op, place) for op, place in means if _behind_identities(op.inputs[place]).op.name not in names]
            self._mend([Want(op, place, op.inputs[place], Replicate()) for op, place in firsts], label, tensor)
            placement = self._facts.of(tensor)
        if isinstance(placement, Replicate) and self._facts.is_agreed(tensor):
            with self.working():
                for op in (op for op in self._terms_of(tensor) if row_of(op.type).linear is Linear.TOGETHER):
                    others = [x for x in op.inputs if not self._facts.is_agreed(x)]
                    if any(map(reads_variables, others)):
                        self._add_share(op)
            placement = self._facts.of(tensor)
        return placement

    def is_agreed(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is the same on all ranks since they have agreed on what it is computed of."""
        return self._program.exists_here(tensor) and self._facts.is_agreed(tensor)

    def counts_once(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor`, a number of a custom training loop, is that of one device: of what ranks have agreed on."""
        is_number = self._program.exists_here(tensor) and isinstance(self._facts.of(tensor), Partial | Replicate)
        return is_number and self._facts.is_of_agreed(tensor)

    def settle(self) -> None:
        self.look()

    def close(self, outputs: Any) -> None:
        self.look()

    def look(self) -> None:
        """Mends what goes back to rows, or lets rows meet, in what has been traced since it was called before."""
        if self._is_working or self._rows.are_of_slices or self._program.mesh.size("data") == 1:
            return
        operations = self._program.graph.get_operations()
        start = self._looked_at
        with self.working():
            for op in operations[start:]:
                if not tape.is_backward(op) and any(isinstance(self._facts.of(x), Shard) for x in op.inputs):
                    for x in (x for x in op.outputs if x.dtype != tf.variant):
                        found = self._facts.of(x)
                        if isinstance(found, Unknown) and found.what not in self._looked_for:
                            self._known(x, "layer", may_gather=False)
                            self._looked_for.add(found.what)

    def unknown_since(self, start: int) -> Unknown | None:
        """Returns what operations that no tape has made, from number `start` on, make unknown of rows; None: nothing.

        What a tape has given them counts as rows, where it has as many.
        """
        made: list[tf.Operation] = []
        of_tapes: set[str] = set()
        for op in self._program.graph.get_operations()[start:]:
            is_sum = op.type == "AddN" and all(tape.is_backward(x.op) or x.op.name in of_tapes for x in op.inputs)
            if is_sum:  # of what comes back from several readers
                of_tapes.add(op.name)
            elif not tape.is_backward(op):
                made.append(op)
        names, given = {op.name for op in made}, dict[str, Placement]()
        for x in (x for op in made for x in op.inputs if x.op.name not in names):
            found = self._facts.of(x)
            of_rows = Shard() if self._facts.own_rows_first(x) else Replicate()
            given[x.name] = of_rows if isinstance(found, Unknown) else found
        facts = GivenFacts(given)
        unknown = [(x, found) for op in made for x in op.outputs if isinstance(found := facts.of(x), Unknown)]
        if all(x.consumers() and names.issuperset(reader.name for reader in x.consumers()) for x, _ in unknown):
            return None  # of what goes on back nothing is unknown
        return next((found for x, found in unknown if found.why is not Why.NO_RULE and walks.is_of_users(x.op)), None)

    @contextlib.contextmanager
    def not_seen(self) -> Iterator[None]:
        """A block of operations that are not the user's: they are not looked at, nor later."""
        self.look()
        with self.working():
            yield

    def pass_over(self) -> None:
        """Lets `look` not see what has been traced so far."""
        self._looked_at = len(self._program.graph.get_operations())

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A block whose operations are not looked at, as the repair's own are not; nothing is mended that is not asked for."""
        with temporary.attributes(self, _is_working=True):
            yield
        self.pass_over()

    # What is done

    def _add_share(self, op: tf.Operation) -> None:
        weight = self._rows.weight()
        for place, x in enumerate(op.inputs):
            if self._facts.is_agreed(x):
                share = self._redistribution.make(lambda x, w: x * tf.cast(w, x.dtype), x, weight)
                self._facts.declare(share, Partial(How.SHARE))
                self._redistribution.reads(op, place, share)
        self._facts.declare(op.outputs[0], Partial(How.SUM))

    def _terms_of(self, tensor: tf.Tensor) -> list[tf.Operation]:
        """Returns the operations that add, and multiply by factors, what `tensor` is a sum of, from it on."""
        found: dict[str, tf.Operation] = {}
        waiting = [tensor]
        for op in (_behind_identities(x).op for x in waiting):
            linear = row_of(op.type).linear
            if op.name not in found and linear is not None and is_elementwise(op.type):
                found[op.name] = op
                is_sum = linear is Linear.TOGETHER
                mean = Partial(How.MEAN)
                waiting.extend(x for x in op.inputs if is_sum or self._facts.is_agreed(x) or self._facts.of(x) == mean)
        return list(found.values())

    def _mend(self, wants: Sequence[Want], label: str, target: tf.Tensor) -> None:
        redistribution = self._redistribution
        again = self._remaking
        begun_with = {again.op_now(one.op).name: one.op for one in wants}
        wants = [dataclasses.replace(one, op=again.op_now(one.op), tensor=again.now(one.tensor)) for one in wants]
        with self.working():
            agreed = []
            lost = {want.op.name for want in wants if any(isinstance(self._facts.of(x), Unknown) for x in _read_by(want))}
            for want in wants:
                if want.op.name in lost:
                    continue  # of something that could not be mended
                if want.becomes == Replicate():
                    agreed.append(want)
                elif want.place != OUTPUT:
                    weight = self._rows.weight()
                    mean = redistribution.make(lambda x, w: tf.math.divide_no_nan(x, tf.cast(w, x.dtype)), want.tensor, weight)
                    self._facts.declare(mean, Partial(How.MEAN))
                    redistribution.reads(want.op, want.place, mean)
                elif isinstance(want.becomes, Shard):
                    again.replace(want.tensor, self._padded_to_the_longest(want.tensor, label))
                elif want.becomes == Partial(How.MEAN):
                    self._count_some_rows(want.op, label)
                else:
                    self._add_share(want.op)
            numbers = [want.tensor for want in agreed if isinstance(self._facts.of(want.tensor), Partial)]
            redistribution.agree(numbers, f"agree/{label}")
            for want in agreed:
                if redistribution.found(want.tensor) is None:
                    redistribution.gather(want.tensor, f"gather/{label}")
            for want in (one for one in agreed if not one.is_of_rows):
                redistribution.reads(want.op, want.place, redistribution.found(want.tensor))
            rows = [want for want in agreed if want.is_of_rows]
            again.read([(begun_with[x.op.name], x.place, redistribution.found(x.tensor)) for x in rows], target)

    def _padded_to_the_longest(self, rows: tf.Tensor, label: str) -> tf.Tensor:
        """Returns rows that are padded to the longest of this rank, padded to the longest of all."""
        with self._program.outermost(), tape.stop_recording():
            own = tf.shape(rows)[1:]
            all_rows = all_reduce(own, "data", reduce_op="max", label=f"agree/{label}")
            missing = tf.stack([tf.zeros_like(own), all_rows - own], 1)
        padding = rows.op.inputs[2]
        found = self._redistribution.make(lambda x: tf.pad(x, tf.concat([[[0, 0]], missing], 0), constant_values=padding), rows)
        found.set_shape(rows.shape)
        self._facts.declare(found, Shard())
        return found

    def _count_some_rows(self, op: tf.Operation, label: str) -> None:
        """Lets a mean over some of the rank's rows be such that the ranks' own, by their weights, are that over all of them.

        A row of zeros is appended to them: the mean of none is NaN.
        """
        given, axis = op.inputs[0], self._facts.of(op.inputs[0]).axis
        with self._program.outermost(), tape.stop_recording():
            rows, weight = tf.cast(tf.shape(given)[axis], tf.float64), self._rows.weight()
            all_rows = all_reduce(rows, "data", label=f"agree/{label}")
            self._facts.declare_agreed(all_rows)
            factor = tf.where(weight > 0, (rows + 1) / (weight * all_rows), tf.zeros_like(rows))

        def counted(x: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
            none = tf.zeros_like(tf.reduce_sum(x, axis, keepdims=True))
            return tf.concat([x, none], axis) * tf.cast(factor, x.dtype)

        self._redistribution.reads(op, 0, self._redistribution.make(counted, given, factor))
        self._facts.declare(op.outputs[0], Partial(How.MEAN))


def _behind_identities(tensor: tf.Tensor) -> tf.Tensor:
    """Returns what `tensor` is passed on from, through the ends of custom gradients."""
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _read_by(want: Want) -> list[tf.Tensor]:
    """Returns what must be known where `want` is done: beside what is not, a sum is better left a rank's own."""
    return [x for place, x in enumerate(want.op.inputs) if place not in row_of(want.op.type).ignores]


@contextlib.contextmanager
def meant_of_own_rows(program: RankProgram | None, like: tf.Tensor | None = None) -> Iterator[list[tf.Tensor]]:
    """A block in which a rank computes, of its own rows, what other ranks' rows are not to change, as in `BatchNormalization`.

    Gives a list for what the block has computed, which counts as the same on all ranks, or as what is `like` it.
    """
    found: list[tf.Tensor] = []
    here = None if program is None else program.here()
    if here is None:
        yield found
        return
    facts = facts_of(here)
    with (here.part(EagerFacts) if program.is_eager else here.part(Repair)).not_seen():
        yield found
    for x in found:
        facts.declare(x, Replicate() if like is None or not here.exists_here(like) else facts.of(like))
