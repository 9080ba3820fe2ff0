"""The placements of the tensors of one rank's eager run, each found as its operation runs; and the numbers that ranks agree on.

    tf.sqrt(mean)        has run of the rank's own mean: the ranks agree on the mean, and it runs once more, of that of all rows
    x - mean(x)          the same; in backward the derivative by the mean is agreed on
    total + mean         nothing is sent: a rank's sum, over its weight, is a mean
    if mean < 0.5:       a comparison is an operation, too
    x @ transposed(x)    not known: the rows of other ranks would have another number, and the code around has seen that

What the user's code is handed, and what tapes go back through, is the second result; nobody reads the first. So all ranks must
run the same operations, as they must run the same collectives. What Python has read (`float(mean)`) is no operation.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import Part, RankProgram
from tfdist.collectives.results import Results
from tfdist.graphs import eager_operations, tape
from tfdist.graphs.frames import is_asked_by_keras, line_that_runs, reader_of_numbers
from tfdist.graphs.records import bears_gradients
from tfdist.placements.eager_call import EagerCall
from tfdist.placements.facts import Facts, given_placements
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Unknown, Why
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.table import Kind, is_quotient, placements_of, row_of
from tfdist.placements.totals import EXTREMES, MEANS, Totals

KNOWN, _AGREED, _SUMMED = "_tfdist_known", "_tfdist_agreed", "_tfdist_summed"  # of eager tensors
_RANDOM = (Kind.RANDOM, Kind.SAMPLER)


class _Known(NamedTuple):
    run: object  # in which it is known: tensors may outlive one
    placement: Placement
    is_agreed: bool = False  # computed of what ranks have agreed on
    is_gradient: bool = False  # by weights, or computed of such
    is_of_weights: bool = False  # of what variables hold
    why: Unknown | None = None  # the placement is taken for one that it may not be: as if it were of a rank's own rows


class EagerFacts(Part):
    """The placements of one eager rank's tensors. A part of its state."""

    def __init__(self, program: RankProgram):
        self._run, self._is_busy, self._is_mending = object(), False, program.mesh.size("data") > 1
        self._rows = program.part(RankRows)
        self._totals = program.part(Totals)
        self._constant = _Known(self._run, Replicate())
        for x, placement in given_placements(program):
            self.declare(x, placement)
        program.part(Results).tell = self._tell

    def of(self, tensor: tf.Tensor) -> Placement:
        """Returns the placement of `tensor`."""
        return self._of(tensor).placement

    def unknown(self, tensor: tf.Tensor) -> Unknown | None:
        """Returns why the placement of `tensor` is not known, but taken for one; None: it is known."""
        found = self._of(tensor)
        return found.placement if isinstance(found.placement, Unknown) else found.why

    def counts_once(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor`, a loss of a custom training loop, is that of one device, or a mean, of what ranks have agreed on."""
        found = self._of(tensor)
        return found.is_agreed and found.placement in (Replicate(), Partial(How.MEAN))

    def is_whole(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is the same on all ranks, and is of gradients, of what ranks have agreed on, or of weights."""
        found = self._of(tensor)
        return isinstance(found.placement, Replicate) and (found.is_agreed or found.is_gradient or found.is_of_weights)

    def is_of_gradients(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor`, the same on all ranks, is of gradients."""
        found = self._of(tensor)
        return isinstance(found.placement, Replicate) and found.is_gradient

    def is_whole_gradient(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor`, the same on all ranks, is of gradients, or a constant, which may have been made of them."""
        return self._of(tensor) is self._constant or self.is_of_gradients(tensor)

    def is_of_weights(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is computed of weights alone."""
        found = self._of(tensor)
        return found.placement == Replicate() and found.is_of_weights and not found.is_agreed

    def declare(self, tensor: tf.Tensor, placement: Placement, *, is_gradient: bool = False, is_of_weights: bool = False) -> None:
        """Says what the placement of `tensor` is, whatever it is computed of."""
        self._set(tensor, _Known(self._run, placement, False, is_gradient, is_of_weights))

    def own_use(self) -> contextlib.AbstractContextManager[None]:
        """A block of operations that are not the user's."""
        return temporary.attributes(self, _is_mending=False)

    def not_seen(self) -> contextlib.AbstractContextManager[None]:
        """A block of operations that are not looked at."""
        return temporary.attributes(self, _is_busy=True)

    def as_whole(self, tensor: tf.Tensor, label: str) -> tf.Tensor:
        """Returns what `tensor`, if it is a number of each rank, is on one device."""
        with self.not_seen():
            is_number = self._is_mending and isinstance(self.of(tensor), Partial)
            return self._agreed([tensor], label)[0] if is_number else tensor

    def without_extremes(self, tensor: tf.Tensor, label: str) -> tf.Tensor:
        """Returns `tensor`, or what ranks have agreed on where it is a maximum or a minimum of each one's rows."""
        placement = self.of(tensor)
        return self.as_whole(tensor, label) if isinstance(placement, Partial) and placement.is_extreme else tensor

    def as_mean(self, tensor: tf.Tensor, label: str) -> tf.Tensor:
        """Returns `tensor` such that the ranks' own, by their weights, make up what one device has, as far as that is known."""
        tensor = self.as_whole(tensor, label) if tensor.dtype.is_integer else self.without_extremes(tensor, label)
        placement = self.of(tensor)
        with self.not_seen():
            return self._over_weight(tensor) if isinstance(placement, Partial) and placement.is_sum else tensor

    # What runs

    def see(self, kind: str, inputs: Sequence[Any], attributes: Sequence[Any], outputs: list[Any], may_replace: bool) -> None:
        """Looks at an operation that has run, and puts other results in the place of its `outputs` if it must be mended."""
        if kind in tape.WRITES and not self._is_busy:
            self._note_written(kind, *inputs)
        if self._is_busy or not outputs:
            return
        known = [self._of(x) for x in inputs]
        if kind == "ReadVariableOp" and known[0].is_gradient:
            found = [known[0]]
        elif kind in tape.READS and isinstance(known[-1].placement, Replicate):
            found = [_Known(self._run, Replicate(), is_of_weights=True)]
        elif all(x is self._constant for x in known) and row_of(kind).kind not in _RANDOM:
            return
        else:
            with self.not_seen():
                are_constant = [x is self._constant for x in known]
                call = EagerCall(kind, [x.placement for x in known], are_constant, inputs, attributes, outputs)
                found = self._found(call, known, outputs if may_replace else None)
        for x, one in zip(outputs, found, strict=True):
            self._set(x, one)
        if kind == "Sum" and isinstance(known[0].placement, Shard):
            setattr(outputs[0], _SUMMED, inputs[0].shape.num_elements())

    def _note_written(self, kind: str, handle: tf.Tensor, value: tf.Tensor) -> None:
        """Notes whether the variable of `handle` holds the rank's own gradient, or a sum of such."""
        known = self._of(value)
        is_own = known.is_gradient and isinstance(known.placement, Partial)
        if is_own or kind == "AssignVariableOp":
            self._set(handle, known if is_own else self._constant)

    def _found(self, call: EagerCall, known: Sequence[_Known], outputs: list[Any] | None) -> list[_Known]:
        placements = _placements(call)
        if is_quotient(call.type) and placements == [Partial(How.SUM)] and self._divides_by_own_rows(call):
            placements = [Partial(How.MEAN) if is_asked_by_keras() else Unknown(Why.OWN_ROWS)]
        numbers = [place for place, x in enumerate(known) if isinstance(x.placement, Partial) and not x.is_gradient]
        is_gradient = any(x.is_gradient for x in known)
        is_agreed = any(x.is_agreed for x in known)
        unknown = next((x for x in placements if isinstance(x, Unknown)), None)
        is_first = unknown is not None and not any(isinstance(x.placement, Unknown) for x in known)
        meets = is_gradient and bool(numbers) and unknown is None
        line, is_users = line_that_runs() if is_first or meets else ("", False)
        reason = next((x.why for x in known if x.why is not None), None)
        can_mend = self._is_mending and is_users and outputs and call.is_pure
        if reason is not None or Unknown(Why.OWN_ROWS) in placements:  # ranks may differ in what they have: nothing is sent
            can_mend = can_mend and unknown is not None and unknown.why is Why.MIXED
        if (is_first or meets) and can_mend:
            mended = self._mended(call, unknown, numbers if is_gradient else [], outputs)
            if mended is not None:
                placements, is_agreed = mended, True
        unknown = next((x for x in placements if isinstance(x, Unknown)), None)
        if is_first and unknown is not None:
            reason = reason or Unknown(unknown.why, call.type + line)
            has_rows = any(isinstance(x.placement, Shard) for x in known)
            ranks = [shape.rank for shape in call.results]
            taken = [Shard() if has_rows and rank else Partial(How.MEAN) for rank in ranks]
            placements = [y if isinstance(x, Unknown) else x for x, y in zip(placements, taken, strict=True)]
        of_weights = any(x.is_of_weights for x in known)
        return [_Known(self._run, x, is_agreed, is_gradient, of_weights, reason) for x in placements]

    def _divides_by_own_rows(self, call: EagerCall) -> bool:
        """Whether a sum over rows is divided by the rank's own number of them, which Python has read, or a constant like it: of
        Keras, which divides by no constant, by that number."""
        divisor = call.value(1)
        is_number = self._rows.are_means and divisor is not None and divisor.size == 1
        return is_number and float(divisor.reshape(-1)[0]) in (int(self._rows.rows), getattr(call.read[0], _SUMMED, None))

    def _mended(
        self, call: EagerCall, unknown: Unknown | None, first: Sequence[int], outputs: list[Any]
    ) -> list[Placement] | None:
        """Runs an operation again of what it is to read, those number `first` before others; None: that does not help."""
        why = None if unknown is None else unknown.why
        if why is Why.SOME_ROWS and call.type == "Mean":
            outputs[0] = self._mean_of_some(call, outputs[0])
            return [Partial(How.MEAN)]
        is_mixed = why is Why.MIXED and outputs[0].dtype.is_floating
        if is_mixed and not self._rows.are_means:
            return [Partial(How.SUM)]
        numbers = {place: x for place, x in enumerate(call.inputs) if isinstance(x, Partial)}
        sums = [place for place, x in numbers.items() if x.is_sum]
        can_agree = not any(call.dtypes[place].is_integer and x.how is How.COUNT for place, x in numbers.items())
        for wanted in (sums,) if is_mixed else (first, list(numbers)) if can_agree else ():
            placement = Partial(How.MEAN) if is_mixed else Replicate()
            new = tuple(placement if place in wanted else x for place, x in enumerate(call.inputs))
            placements = _placements(call.given(new))
            if wanted and not any(isinstance(x, Unknown) for x in placements):
                tensors = [call.read[place] for place in wanted]
                made = [self._over_weight(x) for x in tensors] if is_mixed else self._agreed(tensors)
                read = dict(zip(wanted, made, strict=True))
                inputs = [read.get(place, x) for place, x in enumerate(call.read)]
                outputs[:] = eager_operations.run_again(call.type, inputs, call.attributes, len(outputs))
                return placements
        return None

    def _mean_of_some(self, call: EagerCall, mean: tf.Tensor) -> tf.Tensor:
        """Returns a mean over some of the rank's rows such that the ranks' own, by their weights, are that over all of them."""
        given, axes = call.read
        with tape.stop_recording():
            weight, elements = self._rows.weight(), tf.cast(tf.size(given), tf.float64)
            (total,) = self._totals.reduced([elements], "sum", "agree/step")
            factor = tf.math.divide_no_nan(tf.cast(tf.size(mean), tf.float64), weight * total)
        return tf.reduce_sum(given, axes, keepdims=call.attribute("keep_dims")) * tf.cast(factor, given.dtype)

    def _over_weight(self, x: tf.Tensor) -> tf.Tensor:
        with tape.stop_recording():
            weight = tf.cast(self._rows.weight(), x.dtype)
        made = tf.math.divide_no_nan(x, weight)
        self._set(made, _Known(self._run, Partial(How.MEAN)))
        return made

    def line_that_reads(self, tensor: tf.Tensor) -> str | None:
        """Returns the line of the user's code in which Python reads numbers of the rank's own rows; None: none does."""
        placement = self.of(tensor)
        is_count = isinstance(placement, Partial) and tensor.dtype.is_integer
        if is_count or isinstance(placement, Replicate | Lengths | Places) or self._is_busy or not self._is_mending:
            return None
        reader = reader_of_numbers()
        line, is_users = ("", False) if reader is None else line_that_runs(reader)
        return line if is_users else None

    # What ranks agree on

    def _agreed(self, tensors: Sequence[tf.Tensor], label: str = "step") -> list[tf.Tensor]:
        missing = list({id(x): x for x in tensors if not self._is_agreed_on(x)}.values())
        if missing:
            hows = [found.how for found in map(self.of, missing) if isinstance(found, Partial)]
            with tape.stop_recording():
                totals = [tf.identity(x) for x in self._totals.of(missing, hows, f"agree/{label}")]
            for x, total in zip(missing, totals, strict=True):
                self._set(total, _Known(self._run, Replicate(), is_agreed=True, is_gradient=self._of(x).is_gradient))
                setattr(x, _AGREED, total)
            bearing = [place for place, x in enumerate(missing) if bears_gradients(x)]
            given, found, how_of = ([of[place] for place in bearing] for of in (missing, totals, hows))
            tape.record_gradient("Agree", found, given, lambda *upstream: self._back(given, found, how_of, upstream))
        return [getattr(x, _AGREED) for x in tensors]

    def _is_agreed_on(self, x: tf.Tensor) -> bool:
        """Whether ranks have agreed on `x`, and the tapes that record now know of it."""
        total = getattr(x, _AGREED, None)
        is_of_run = total is not None and self._of(total) is not self._constant
        return is_of_run and (not bears_gradients(x) or tape.tapes_watching([total]) >= tape.tapes_watching([x]))

    def _back(
        self, given: Sequence[tf.Tensor], found: Sequence[tf.Tensor], hows: Sequence[How], upstream: Sequence[Any]
    ) -> list[tf.Tensor]:
        """What comes back to a rank's numbers from what all ranks have read of those agreed on: see `redistribute`."""
        extremes = [place for place, how in enumerate(hows) if how in EXTREMES]
        with self.not_seen():
            equal = [tf.cast(tf.equal(given[place], found[place]), given[place].dtype) for place in extremes]
            wholes = self._totals.reduced([*self._parts(upstream), *equal], "sum", "agree/gradient")
            back = [tf.cast(v, x.dtype) for v, x in zip(wholes, given, strict=False)]
            for place, how in enumerate(hows):
                if how in MEANS:
                    back[place] *= tf.cast(self._rows.weight(), back[place].dtype)
            for place, one, total in zip(extremes, equal, wholes[len(given) :], strict=True):
                back[place] *= tf.math.divide_no_nan(one, tf.cast(total, one.dtype))
        return back

    def of_all_readers(self, upstream: Any) -> tf.Tensor:
        """Returns the derivative of one device, from what has come back on each rank to a sum of gradients that all read."""
        with self.not_seen():
            return self._totals.reduced(self._parts([upstream]), "sum", "agree/gradient")[0]

    def _parts(self, upstream: Sequence[Any]) -> list[tf.Tensor]:
        """Returns a rank's parts of derivatives; of one without rows, where they may be NaN, 0."""
        tensors = [tf.convert_to_tensor(x) for x in upstream]
        return [tf.math.multiply_no_nan(x, tf.cast(self._rows.rows > 0, x.dtype)) for x in tensors]

    # What is known

    def _of(self, tensor: tf.Tensor) -> _Known:
        found = getattr(tensor, KNOWN, None)
        if self._rows.is_weight(tensor):
            return _Known(self._run, Partial(How.SHARE))
        return found if found is not None and found.run is self._run else self._constant

    def _set(self, tensor: tf.Tensor, known: _Known) -> None:
        setattr(tensor, KNOWN, known)

    def _tell(self, found: tf.Tensor, is_same: bool, given: tf.Tensor | None) -> None:
        """Notes what a collective has returned: the same on all ranks, or like what it was `given`."""
        if given is not None:
            self._set(found, self._of(given))
        else:
            placement = Replicate() if is_same else Unknown(Why.NO_RULE, "a collective")
            self._set(found, _Known(self._run, placement))


def _placements(call: EagerCall) -> list[Placement]:
    """Returns the placements of what a call returns: with numbers of rows that differ, if that is enough, else as they are."""
    found = placements_of(call)
    return placements_of(call.with_own_rows()) if any(isinstance(x, Unknown) for x in found) else found


def facts_of(program: RankProgram) -> "EagerFacts | Facts":
    """Returns what is known of the tensors of an eager rank, or of a traced one."""
    return program.part(EagerFacts) if program.is_eager else program.part(Facts)


def own_use(program: RankProgram) -> contextlib.AbstractContextManager[None]:
    """A block of operations that are not the user's, if `program` runs eagerly: an optimizer's, a metric's."""
    return program.part(EagerFacts).own_use() if program.is_eager else contextlib.nullcontext()


@contextlib.contextmanager
def watching(program: RankProgram) -> Iterator[None]:
    """A block in which the rank's function runs; if eagerly, its operations are seen."""
    if not program.is_eager or program.mesh.splits_layers:
        yield
        return
    with eager_operations.each_operation_seen_by(program.part(EagerFacts).see):
        yield
