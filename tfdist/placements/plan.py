"""A plan of the reads of other ranks' values by which a tensor is known, before anything is done.

Each operation that makes of known inputs what is not known is asked for what it would have to read instead. That is assumed, and
the next ones are asked, until the tensor is known. What nothing can be done about is lost, and taken for a rank's own.
"""

import dataclasses
from collections.abc import Collection

import tensorflow as tf

from tfdist.collectives import OfBranch, RankProgram, can_be_gathered
from tfdist.graphs import records, tape, walks
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Unknown, Why
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.remaking import Remaking
from tfdist.placements.surroundings import bytes_of, goes_on_linearly, is_size, readers_of
from tfdist.placements.table import is_elementwise, is_shape

OUTPUT = -1
_WEIGHT = Partial(How.SHARE)
_FEW_BYTES = 2**20  # of numbers that ranks agree on, whatever `most_bytes` is
_MOST_WAVES = 100  # of numbers that are computed of agreed numbers, and need to be agreed on again


@dataclasses.dataclass(frozen=True, eq=False)
class Want:
    """That `op` reads something else in the place of `tensor`, its input number `place`, or returns it."""

    op: tf.Operation
    place: int
    tensor: tf.Tensor
    becomes: Placement
    is_of_rows: bool = False  # or of their number, and has another size then


class RepairPlan(OfBranch):
    """Plans for the graph of one rank's program. A part of its state, and of a branch's.

    Attributes:
        most_bytes: of rows that are gathered, on a rank; 0: none are.
        bears_shares: whether what reads the tensor may read a rank's share, in a custom training loop.
    """

    def __init__(self, program: RankProgram):
        self._program = program
        self._facts = program.part(Facts)
        self._rows = program.part(RankRows)
        self._remaking = program.part(Remaking)
        self.bears_shares = True
        self.most_bytes: int = 0 if program.outer is None else program.outer.part(RepairPlan).most_bytes

    def of(self, tensor: tf.Tensor, may_gather: bool) -> tuple[list[list[Want]], list[str]]:
        """Returns what is to be read so that `tensor` is known, in the order in which it is needed; and what cannot be mended."""
        barred: set[str] = set()  # operations that are not given rows of other ranks, since what reads them does not bear it
        while True:
            waves, lost = self._waves(tensor, may_gather, barred)
            own = {x.name for op in readers_of(lost) for x in op.outputs if x.shape.rank != 0}  # of own rows, as it stays
            # An integer may be a number of rows, which what reads rows must have, too.
            read = [want for wants in waves for want in wants if want.place != OUTPUT]
            sizes = [want for want in read if want.is_of_rows or want.tensor.dtype.is_integer]
            new = {want.op.name for want in sizes if not self._is_borne(want, own, tensor)} - barred
            if not new:
                what = [self._facts.of(x).what for op in lost for x in op.outputs if isinstance(self._facts.of(x), Unknown)]
                return waves, what
            barred |= new

    def _stays(self, tensor: tf.Tensor) -> set[str]:
        """Returns what `tensor` is computed of that is the same on all ranks, and has the sizes that it has."""
        before = (x for x in walks.before(tensor) if isinstance(self._facts.of(x), Replicate))
        return {x.name for x in before if not self._facts.is_agreed(x)}

    def _waves(self, tensor: tf.Tensor, may_gather: bool, barred: Collection[str]) -> tuple[list[list[Want]], list[tf.Operation]]:
        waves: list[list[Want]] = []
        lost: list[tf.Operation] = []
        stays = self._stays(tensor) if may_gather else ()
        with self._facts.assuming() as assume:
            while isinstance(self._facts.of(tensor), Unknown) and len(waves) < _MOST_WAVES:
                wants = []
                for op in self._facts.reasons_of(tensor):
                    found = self._wants_of(op, may_gather and op.name not in barred, stays)
                    wants += found
                    if not found and any(isinstance(one, Unknown) for one in self._facts.inputs_of(op)):
                        continue  # these are asked, too
                    if not found:  # as if it were of a rank's own rows
                        lost.append(op)
                        has_rows = any(isinstance(one, Shard) for one in self._facts.inputs_of(op))
                        for place in (place for place, x in enumerate(op.outputs) if isinstance(self._facts.of(x), Unknown)):
                            assume(op, -1 - place, Shard() if has_rows and op.outputs[place].shape.rank else Partial(How.MEAN))
                waves.append(wants)
                for want in wants:
                    assume(want.op, want.place, want.becomes)
        return waves, lost

    def _is_borne(self, want: Want, own: Collection[str], tensor: tf.Tensor) -> bool:
        """Whether what reads the result of an operation, on the way to `tensor`, bears that it is of the rows of all ranks."""
        op, after = want.op, readers_of([want.op])
        if any(x.name in own for one in after for x in (*one.inputs, *one.outputs)):
            return False
        if not want.is_of_rows:
            return True
        if self._remaking.is_needed():
            return self._remaking.can_be_made([op], tensor)
        after = [one for one in after if not (is_shape(one.type) and one.inputs[0].shape.rank == 0)]  # none, whatever is read
        has_effects = any(tape.has_an_effect(one) or not one.outputs for one in after)
        return not has_effects and all(isinstance(self._facts.of(x), Unknown) for one in after for x in one.outputs)

    def _wants_of(self, op: tf.Operation, may_gather: bool, stays: Collection[str]) -> list[Want]:
        inputs, found = self._facts.inputs_of(op), map(self._facts.of, op.outputs)
        why = next((x.why for x in found if isinstance(x, Unknown)), None)
        is_control = op.type in (*tape.BRANCHES, *tape.LOOPS)
        if op.graph is not self._program.graph or not records.has_gradient(op) or tape.is_backward(op):
            return []
        if is_control and (why not in (Why.FUNCTION, Why.GOES_BACK, Why.MIXED) or self._program.has_sent_in(op)):
            return []
        if op.type == "RaggedTensorToTensor" and isinstance(inputs[1], Shard) and isinstance(inputs[2], Replicate):
            return [Want(op, OUTPUT, op.outputs[0], Shard())]
        if why is Why.SOME_ROWS:
            return [Want(op, OUTPUT, op.outputs[0], Partial(How.MEAN))] if op.type == "Mean" else []
        is_share = self.bears_shares and not self._rows.are_means and not any(map(self._facts.is_of_agreed, op.inputs))
        if why is Why.MIXED and is_share and goes_on_linearly(op, self._facts):
            return [Want(op, OUTPUT, op.outputs[0], Partial(How.SUM))]
        numbers = [place for place, one in enumerate(inputs) if isinstance(one, Partial) and not is_size(op, place)]
        loops_over_rows = is_control and any(isinstance(one, Lengths | Places | Shard) for one in inputs)
        # An integer may be a number of rows, beside own ones; with its weight a rank changes gradients.
        if not may_gather or loops_over_rows:
            numbers = [place for place in numbers if not op.inputs[place].dtype.is_integer and inputs[place] != _WEIGHT]
        if why is Why.MIXED and numbers and op.outputs[0].dtype.is_floating and self._rows.are_means:
            return [Want(op, place, op.inputs[place], Partial(How.MEAN)) for place in numbers if inputs[place].is_sum]
        if numbers:
            most, reads = max(self.most_bytes, _FEW_BYTES), self._reads_of_numbers(op, numbers)
            fit = all(self.can_agree(one.inputs[place]) and bytes_of(one.inputs[place], 0) <= most for one, place in reads)
            return [Want(one, place, one.inputs[place], Replicate()) for one, place in reads] if fit else []
        own = [place for place, one in enumerate(inputs) if not isinstance(one, Replicate)]
        axes = {one.axis - (op.inputs[place].shape.rank or 0) for place, one in enumerate(inputs) if isinstance(one, Shard)}
        beside = [x.shape for x in op.inputs if x.name in stays and is_elementwise(op.type)]
        if any(shape.rank and shape.rank >= -axis and shape[axis] != 1 for shape in beside for axis in axes):
            return []  # as many numbers as a rank has rows
        can = may_gather and self.most_bytes > 0 and not is_control
        can = can and all(self._can_gather(op.inputs[place], inputs[place]) for place in own)
        return [Want(op, place, op.inputs[place], Replicate(), is_of_rows=True) for place in own] if can else []

    def _reads_of_numbers(self, op: tf.Operation, places: Collection[int]) -> list[tuple[tf.Operation, int]]:
        """Returns where `op` reads its inputs number `places`, `Partial` numbers; of a list of tensors where it was made.

        Elements of a list that is made anew are known after it, and are not asked for.
        """
        found, waiting = [], [(op, place) for place in places]
        for one, place in waiting:
            x = one.inputs[place]
            if x.dtype == tf.variant:
                waiting.extend((x.op, at) for at, given in enumerate(self._facts.inputs_of(x.op)) if isinstance(given, Partial))
            else:
                found.append((one, place))
        lists = {x.name for one, _ in found if one is not op for x in one.outputs}
        return [(one, place) for one, place in found if not any(x.name in lists for x in walks.before(one.inputs[place]))]

    def can_agree(self, number: tf.Tensor) -> bool:
        """Whether `number` has one shape on all ranks: batches of several workers may be padded to different lengths."""
        is_alone = len(self._program.communicator.local_ranks) == self._program.mesh.world_size
        has_size = number.op.type == "DenseBincount" and isinstance(self._facts.inputs_of(number.op)[1], Replicate)
        return number.shape.is_fully_defined() or has_size or is_alone and number.shape.rank is not None

    def _can_gather(self, tensor: tf.Tensor, placement: Placement) -> bool:
        """Whether `tensor`, of own rows or of their number, can be that of all where it stands."""
        if isinstance(placement, Lengths):
            return placement.is_even
        if isinstance(placement, Places):
            is_numbered = placement.are_all or (len(placement.rows) == 1 and placement.pieces == 1)
            return is_numbered and all(size == 1 for size in tensor.shape[1:]) and self._program.outer is None
        if isinstance(placement, Partial):
            return self.can_agree(tensor)
        is_known = isinstance(placement, Shard) and bool(tensor.shape.rank)
        is_known = is_known and (len(set(placement.rows)) <= 1 or self._program.outer is None)
        return is_known and can_be_gathered(tensor) and bytes_of(tensor, placement.axis) <= self.most_bytes
