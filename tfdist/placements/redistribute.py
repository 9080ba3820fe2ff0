"""Placements changed: what ranks have of a tensor becomes that of one device, the same on all.

    a number of all rows    the ranks agree on it: one all-reduce of all numbers that are asked for together
    rows                    gathered, in the order of one device

Why gradients are right. The reductions of the step multiply a rank's gradients by a factor f_r (its weight, or 1 where that has
entered before) and add them up. A derivative v_r that comes back to an agreed value is of the readers of this rank alone; that of
one device is V = sum_r f_r v_r, and nothing needs to be sent for it where v_r is known to be the same on all ranks. Then

    M = sum_r w_r m_r    passes on  w_r V / f_r      a mean, with the rank's weight w_r
    S = sum_r s_r        passes on  V / f_r
    X = concat_r x_r     passes on  V[its rows] / f_r
    T = max_r t_r        passes on  V / f_r where t_r = T, divided among all that are equal to it
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import OfBranch, RankProgram, all_gather, all_reduce, gather_rows
from tfdist.custom_gradients import with_adjoint
from tfdist.graphs import records, tape
from tfdist.graphs.walks import inputs_first
from tfdist.placements.constants import value_of
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import How, Lengths, Partial, Places, Replicate, Shard
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.totals import EXTREMES, MEANS, Tensors, Totals, wide


@dataclasses.dataclass(eq=False)
class _Agreement:
    inputs: Tensors
    outputs: Tensors
    back: Callable[..., Tensors]  # of what comes back to outputs: what comes back to inputs


class Redistribution(OfBranch):
    """Redistributed tensors of the graph of one rank's program. A part of its state, and of a branch's.

    Attributes:
        made: operations that are none of the user's program, and that tapes have not seen.
    """

    def __init__(self, program: RankProgram):
        self._program = program
        self._facts = program.part(Facts)
        self._rows = program.part(RankRows)
        self._totals = program.part(Totals)
        self._found: dict[str, tf.Tensor] = {}
        self._changes: list[_Agreement | tf.Operation] = []  # of which tapes must be told
        self.made: set[tf.Operation] = set()
        self._told: dict[int, tuple[tf.GradientTape, int]] = {}  # how many, by the id of a tape, which stays its own

    @property
    def bears_gradients(self) -> bool:
        """Whether ranks have agreed on numbers that a tape may go back through."""
        return any(isinstance(change, _Agreement) for change in self._changes)

    def found(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns what `agree` or `gather` has made of `tensor`."""
        return self._found.get(tensor.name)

    def agree(self, tensors: Tensors, label: str) -> None:
        """Lets the ranks agree on `tensors`, each `Partial`, of static shapes: one message, one more for maxima and minima."""
        missing = self._agreed_outside([x for x in {x.name: x for x in tensors}.values() if x.name not in self._found], label)
        hows = {x.name: self._facts.of(x).how for x in missing}
        with self._program.outermost(), tape.stop_recording():
            totals = self._totals.of(missing, [hows[x.name] for x in missing], label)
        pairs = list(zip(missing, totals, strict=True))
        means = [x.name for x in missing if hows[x.name] in MEANS]  # now: they may become known later
        for is_extreme, back in ((False, functools.partial(self._back_to_sums, means)), (True, self._back_to_extremes)):
            self._note([pair for pair in pairs if (hows[pair[0].name] in EXTREMES) is is_extreme], back)

    def _agreed_outside(self, tensors: Tensors, label: str) -> list[tf.Tensor]:
        """Lets the ranks agree on what a branch has captured before they enter it; returns the others."""
        captured = {x.name: outside for x in tensors if (outside := self._facts.outside_of(x)) is not None}
        for program in dict.fromkeys(program for program, _ in captured.values()):
            program.part(Redistribution).agree([outer for one, outer in captured.values() if one is program], label)
        for name, (program, outer) in captured.items():
            with self._program.outermost(), tape.stop_recording():
                self._found[name] = tf.identity(program.part(Redistribution).found(outer))
            self._facts.declare_agreed(self._found[name])
        return [x for x in tensors if x.name not in self._found]

    def make(self, build: Callable[..., Any], *tensors: tf.Tensor) -> Any:
        """Returns `build(*tensors)`, of operations that tapes go back through."""
        with self._program.outermost(), tape.stop_recording():
            start = tape.operations_so_far()
            made = build(*tensors)
            for op in tape.operations_since(start):
                if op.inputs:
                    self.note_made(op)
        return made

    def note_made(self, op: tf.Operation) -> None:
        """Notes that `op` was made, for tapes to go back through."""
        self._changes.append(op)
        self.made.add(op)

    def gather(self, tensor: tf.Tensor, label: str) -> None:
        """Gathers the rows of `tensor`, a `Shard`, from all data ranks; the way back sums what readers of all ranks send. Of
        `Places` and `Lengths` the number of rows of all ranks is known after it."""
        if tensor.name in self._found:
            return
        is_number = isinstance(self._facts.of(tensor), Places | Lengths)
        self._found[tensor.name] = self._counted(tensor, label) if is_number else self._gathered(tensor, label)
        self._facts.declare_agreed(self._found[tensor.name])

    def _gathered(self, tensor: tf.Tensor, label: str) -> tf.Tensor:
        placement = self._facts.of(tensor)
        axis = placement.axis

        def swapped(x: tf.Tensor) -> tf.Tensor:
            return keras.ops.swapaxes(x, 0, axis) if axis else x

        def gathered(x: tf.Tensor) -> tf.Tensor:
            if records.bears_gradients(x):
                x = with_adjoint(tf.identity, self._without_factor, x)
            parts = tf.split(x, self._sizes_of(placement.rows), axis) if placement.is_joined else [x]
            whole = tf.concat([swapped(gather_rows(swapped(part), label)) for part in parts], axis)
            return with_adjoint(tf.identity, self._with_factor, whole) if records.bears_gradients(x) else tf.identity(whole)

        found = self.make(gathered, tensor)
        found.set_shape([None if place == axis else size for place, size in enumerate(tensor.shape)])
        return found

    def _sizes_of(self, rows: Sequence[str]) -> int | list[tf.Tensor]:
        """Returns how many rows each of the tensors called `rows` has, or the number of parts where all are the same tensor."""
        if len(set(rows)) == 1:
            return len(rows)
        return [tf.shape(self._program.graph.get_tensor_by_name(name))[0] for name in rows]

    def own_rows(self, whole: tf.Tensor, like: tf.Tensor, label: str) -> tf.Tensor:
        """Returns this rank's rows of `whole`, of all rows of the batch, which was computed in the place of `like`."""

        def own(x: tf.Tensor, first: tf.Tensor, number: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
            shape = tf.concat([[total], tf.shape(x, tf.int64)[1:]], 0)  # fails where it has another number of rows
            rows_of_the_batch = tf.reshape(x, shape, name=f"{label.replace('/', '_')}_returns_as_many_rows_as_the_batch_has")
            return rows_of_the_batch[first : first + number]

        found = self.make(own, whole, *self._rows.place(label))
        found.set_shape([None, *like.shape[1:]])  # code may have made it of as many rows as the batch has, by a constant
        self._facts.declare(found, Shard())
        return found

    def _counted(self, tensor: tf.Tensor, label: str) -> tf.Tensor:
        placement = self._facts.of(tensor)
        with self._program.outermost(), tape.stop_recording():
            if isinstance(placement, Lengths):
                total = all_reduce(tensor[placement.axis], "data", label=label)
                return tf.concat([tensor[: placement.axis], [total], tensor[placement.axis + 1 :]], 0)
            if placement.are_all:
                numbers = tf.range(all_reduce(tf.size(tensor, tf.int64), "data", label=label))
                return tf.cast(tf.reshape(numbers, [-1, *tensor.shape[1:]]), tensor.dtype)
            numbered = tf.shape(self._program.graph.get_tensor_by_name(placement.rows[0]), tensor.dtype)[:1]
            counts = all_gather(numbered, "data", label=f"{label}/rows")
            before = counts[: self._program.mesh.coordinate(self._program.rank).data]
            return gather_rows(tensor + tf.reduce_sum(before), label)

    def reads(self, op: tf.Operation, place: int, new: tf.Tensor) -> None:
        """Makes `op` read `new` at one place, and tapes take the way back through that."""
        tape.reconnect(op, op.inputs[place], new)
        self._changes.append(op)  # again, where it was there: after what makes `new`

    def stands_for(self, new: tf.Tensor, old: tf.Tensor) -> None:
        """Notes that `new` is read in the place of `old`, and that what comes back to it goes back to `old`."""
        self._changes.append(_Agreement([old], [new], lambda upstream: [upstream]))

    def tell(self, gradient_tape: tf.GradientTape) -> None:
        """Tells a tape, which is about to be asked for a gradient, what has changed of what it has recorded."""
        told = self._told.get(id(gradient_tape), (gradient_tape, 0))[1]
        if told == len(self._changes):
            return
        self._told[id(gradient_tape)] = gradient_tape, len(self._changes)
        with records.recording(gradient_tape):
            for change in _inputs_first(self._changes[told:]):
                if isinstance(change, _Agreement):
                    records.record_function(change.outputs, change.inputs, change.back, "Redistribute")
                elif change in self.made or records.is_recorded(change):
                    records.record_again(change)

    def _note(self, pairs: Sequence[tuple[tf.Tensor, tf.Tensor]], back: Callable[..., Tensors]) -> None:
        for x, y in pairs:
            self._found[x.name] = y
            self._facts.declare_agreed(y)
        pairs = [(x, y) for x, y in pairs if records.bears_gradients(x)]
        if pairs:
            given, found = zip(*pairs, strict=True)
            self._changes.append(_Agreement(given, found, functools.partial(back, given, found)))

    # The way back

    def _back_to_sums(self, means: Sequence[str], given: Tensors, found: Tensors, *upstream: tf.Tensor) -> Tensors:
        del found
        return [
            self._without_factor(v * tf.cast(self._rows.weight(), v.dtype) if x.name in means else v)
            for x, v in zip(given, self._of_one_device(*upstream), strict=True)
        ]

    def _back_to_extremes(self, given: Tensors, found: Tensors, *upstream: tf.Tensor) -> Tensors:
        """Divides what comes back among all values that are equal to the extreme, as TensorFlow does among a rank's own."""
        wholes = self._of_one_device(*upstream)
        equal = []
        for x, y in zip(given, found, strict=True):
            if x.op.type in ("Max", "Min"):
                (values, axes), keeps = x.op.inputs, x.op.get_attr("keep_dims")
                kept = y if keeps else keras.ops.expand_dims(y, value_of(axes).reshape(-1).tolist())
                equal.append(tf.reduce_sum(tf.cast(tf.equal(values, kept), wide(x).dtype), axes, keeps))
            else:
                equal.append(tf.cast(tf.equal(x, y), wide(x).dtype))
        totals = self._totals.reduced(equal, "sum", "agree/gradient")
        return [
            self._without_factor(v * tf.math.divide_no_nan(one, total))
            for v, one, total in zip(wholes, equal, totals, strict=True)
        ]

    def _of_one_device(self, *upstream: tf.Tensor) -> list[tf.Tensor]:
        """Returns the derivatives of one device, from those that have come back to what ranks have agreed on."""
        factor, facts = self._rows.factor, self._program.innermost().part(Facts)  # a tape may go back in a branch
        given = [tf.convert_to_tensor(x) for x in upstream]
        found: dict[int, tf.Tensor] = {}
        # What was divided by the number of replicas counts on a rank without rows, too, which cannot tell a share's value.
        are_of_rows = Partial(How.REPLICAS) not in self._facts.declared.values()
        for place, x in enumerate(given):
            placement = facts.of(x)
            if factor is not None and placement in (Replicate(), Partial(How.ALIKE)):
                found[place] = x
            elif factor is None and placement == Partial(How.SHARE) and are_of_rows:
                found[place] = tf.math.divide_no_nan(x, tf.cast(self._rows.weight(), x.dtype))
        missing = [place for place in range(len(given)) if place not in found]
        if missing:
            parts = [self._with_factor(given[place]) for place in missing]
            totals = self._totals.reduced(parts, "sum", "agree/gradient")
            found.update((place, tf.cast(y, given[place].dtype)) for place, y in zip(missing, totals, strict=True))
        return [found[place] for place in range(len(given))]

    def of_all_readers(self, upstream: tf.Tensor) -> tf.Tensor:
        """Returns what has come back to a sum of gradients, which all ranks read, so that it is the same on all: where it is of
        a rank's own rows (`loss * norm`, a loss of each row), the ranks agree on it."""
        placement = self._program.innermost().part(Facts).of(upstream)
        if isinstance(placement, Replicate) or placement in (Partial(How.ALIKE), Partial(How.SHARE)):
            return upstream
        with tape.backward_scope():
            (whole,) = self._of_one_device(upstream)
            return whole if self._rows.factor is not None else whole * tf.cast(self._rows.weight(), whole.dtype)

    def _with_factor(self, x: tf.Tensor) -> tf.Tensor:
        """Returns a rank's part of a derivative; of one without rows, whose own means are NaN, 0 in the place of NaN."""
        if self._rows.factor is not None:
            return tf.math.multiply_no_nan(x, tf.cast(self._rows.factor, x.dtype))
        is_of_none = tf.logical_and(tf.equal(self._rows.rows, 0), tf.logical_not(tf.math.is_finite(tf.math.abs(x))))
        return tf.where(is_of_none, tf.zeros_like(x), x)

    def _without_factor(self, x: tf.Tensor) -> tf.Tensor:
        return x if self._rows.factor is None else tf.math.divide_no_nan(x, tf.cast(self._rows.factor, x.dtype))


def _inputs_first(changes: Sequence[_Agreement | tf.Operation]) -> list[_Agreement | tf.Operation]:
    """Returns each of `changes` once, after those that have made what it reads now."""
    made = {x.name: change for change in changes for x in change.outputs}
    found: dict[int, _Agreement | tf.Operation] = {}
    for last in dict.fromkeys(made.values()):
        before = inputs_first(last, lambda one: [made[x.name] for x in one.inputs if x.name in made], found, id)
        for change in before:
            found[id(change)] = change
    return list(found.values())
