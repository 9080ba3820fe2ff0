"""Whether a loss is a mean over the rows of a batch, as far as its graph tells: what is none, a rank cannot compute of its rows.

From the loss back, through operations on numbers:

    a mean over rows, a penalty of weights, a Keras loss      a rank's own counts its weight: exact
    their sums, and products with what no row changes         exact
    a sum over rows, divided by the number of rows            a mean
    a sum over rows, divided by a constant or by nothing      too small by the number of ranks
    sum / sum (a masked mean, Dice), sqrt(mean) (RMSE), ...   a function of the whole batch: no mean of the ranks' own
    a mean over those rows that satisfy a condition           the same
    one of the rows (the first, the hardest)                  the same
    rows @ transposed rows, wherever the loss comes from      rows are compared with the rank's own alone
    rows - mean over rows, reordered rows, all pairs          rows meet the rank's own alone (see `row_meetings`)
    a gradient (a penalty, a Hessian's product)               not looked behind: what reads one reads that of the batch

In an eager run there is no graph, and nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.collectives.results import Results
from tfdist.graphs import tape
from tfdist.graphs.constants import value_of
from tfdist.graphs.walks import before, inputs_first
from tfdist.losses.row_meetings import RowMeetings
from tfdist.losses.selected_rows import has_selected_rows
from tfdist.losses.static_rows import has_rows
from tfdist.sharding.gradient_graph import is_zero
from tfdist.sharding.row_kinds import RowKind, argument_kinds, of_collective

SUM = "a sum over the rows of a batch"
SUM_OVER_ROWS = "a Keras loss whose reduction is a sum, divided by the number of a device's rows"
FUNCTION = "a function of the whole batch that is no mean over its rows"
COMPARISON = "a product of rows with each other"
MEETING = "rows that meet other rows of the batch (a mean or a sum over rows that goes back to rows, another order, all pairs)"

_PASSING = frozenset(
    "AddN AddV2 Add BiasAdd Cast CheckNumerics ConcatV2 EnsureShape ExpandDims Identity Neg Pack Reshape Squeeze StopGradient "
    "StridedSlice Sub Unpack".split()
)
_ADDING = frozenset("Add AddN AddV2 Sub".split())
_DIVIDING = frozenset("Div DivNoNan RealDiv Xdivy".split())
_MULTIPLYING = frozenset("Mul MulNoNan".split())
_SUMMING = frozenset("L2Loss Sum".split())
_BENDING = frozenset(
    "Abs ClipByValue Cos Elu Erf Exp Expm1 LeakyRelu Log Log1p LogSoftmax Max Maximum Min Minimum Pow Prod Reciprocal Relu Rsqrt "
    "Selu Sigmoid Sin Softmax SoftmaxCrossEntropyWithLogits Softplus Softsign SparseSoftmaxCrossEntropyWithLogits Sqrt Square "
    "SquaredDifference Tanh Xlogy".split()
)
_TAKING = ("GatherV2", "StridedSlice")
_COUNTING = frozenset("Rank Shape ShapeN Size".split())  # of whose input the shape alone matters


class RowMeans:
    """What is known of the losses of one rank in one trace; an attachment of the rank's program."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._results: Results = program.attachment(Results)
        self._means: set[str] = set()
        self._sums: set[str] = set()
        self._arguments: dict[str, RowKind] = {}
        self._same: set[str] = set()
        self._varying: set[str] = set()  # tensors that are known to depend on the batch
        self._same_on_all: set[str] = set()  # operations that are known not to

    def add_mean(self, loss: Any) -> Any:
        """Notes that `loss` needs no look, and returns it."""
        if tf.is_symbolic_tensor(loss):
            self._means.add(loss.name)
        return loss

    def add_sum(self, loss: Any) -> Any:
        """Notes that `loss` counts as the sum over all ranks' rows, as it is, and returns it."""
        if tf.is_symbolic_tensor(loss):
            self._sums.add(loss.name)
        return loss

    def is_mean(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is a loss that counts as a mean over the rank's rows."""
        return tensor.name in self._means

    def is_sum(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is a loss that counts as a sum over the rank's rows."""
        return tensor.name in self._sums or self.fault_of(tensor) == SUM

    def fault_of(self, loss: tf.Tensor) -> str | None:
        """Returns what in `loss` is no mean over rows, in words; None: nothing, as far as can be seen."""
        if not tf.is_symbolic_tensor(loss) or not self._program.exists_here(loss):
            return None
        self._arguments = argument_kinds(self._program)
        waiting, seen = [loss], set()
        while waiting:
            tensor = waiting.pop()
            if tensor.name in seen or tensor.name in self._means | self._sums or not self._varies(tensor):
                continue
            seen.add(tensor.name)
            found = self._look_at(tensor)
            if isinstance(found, str):
                return found
            waiting.extend(found)
        is_first = self._program.local_index == 0  # of several ranks of one process, which compute the same
        if not is_first:
            return None
        meetings = self._meetings_of_rows()
        return COMPARISON if self._compares_rows(loss, meetings) else MEETING if meetings.found_in(loss) else None

    def take_for_same(self, *tensors: tf.Tensor) -> None:
        """Lets `tensors` be taken for the same on all ranks, though they are statistics of each one's rows."""
        self._same.update(tensor.name for tensor in tensors if tf.is_symbolic_tensor(tensor))

    def is_taken_for_same(self, tensor: tf.Tensor) -> bool:
        return tensor.name in self._same

    def _meetings_of_rows(self) -> RowMeetings:
        def of_source(tensor: tf.Tensor) -> RowKind | tf.Tensor | None:
            if tensor.name in self._arguments:
                return self._arguments[tensor.name]
            is_same = tensor.name in self._same or tensor.op.type in ("Placeholder", "ReadVariableOp")
            is_same = is_same or self._is_of_weights(tensor.op)
            return RowKind.SAME if is_same else of_collective(tensor, self._program)

        return RowMeetings(of_source)

    def _look_at(self, tensor: tf.Tensor) -> str | list[tf.Tensor]:
        """Returns the fault of the operation that `tensor` comes from, or the tensors to look at next."""
        op, inputs = tensor.op, list(tensor.op.inputs)
        if tensor.shape.rank and self._is_over_rows(tensor):
            return []  # a value for each row, whose sum is differentiated
        if (like := self._results.like(tensor)) is not None:
            return [like]
        if op.type in _SUMMING:
            return SUM if self._is_over_rows(inputs[0]) else inputs[:1]
        if op.type == "Mean":
            if self._is_over_rows(inputs[0]):
                return FUNCTION if has_selected_rows(inputs[0], self._results) else []
            return inputs[:1]
        if op.type in _TAKING and self._is_over_rows(inputs[0]):
            return FUNCTION  # one of the rows, or some
        if op.type == "IdentityN":  # the end of a custom gradient
            return [inputs[tensor.value_index]]
        if op.type in _PASSING:
            return inputs
        if op.type in _DIVIDING:
            return self._look_at_ratio(*inputs)
        if op.type in _MULTIPLYING:
            varying = [factor for factor in inputs if self._varies(factor)]
            others = [factor for factor in varying if not self._is_count(factor)]
            if len(others) == 1 and len(varying) == 2:
                count = next(factor for factor in varying if factor is not others[0])
                return self._look_at_ratio(others[0], count)
            return others if len(others) < 2 else FUNCTION
        return FUNCTION if op.type in _BENDING else []

    def _compares_rows(self, loss: tf.Tensor, meetings: RowMeetings) -> bool:
        """Whether `loss` is computed of a product of two matrices of the rank's own rows. Gathered rows are no rank's own."""
        is_own: dict[str, bool] = {}

        def inputs_of(tensor: tf.Tensor) -> Sequence[tf.Tensor]:
            is_end = tensor.name in self._arguments or self._is_of_weights(tensor.op)
            return [] if is_end else self._computed_of(tensor)

        for tensor in inputs_first(loss, inputs_of, is_own):
            inputs = inputs_of(tensor)
            is_own[tensor.name] = tensor.name in self._arguments or any(is_own[x.name] for x in inputs)
            is_pairing = tensor.op.type == "MatMul" or tensor.op.type == "Einsum" and meetings.are_pairs(tensor.op)
            if is_pairing and len(inputs) == 2 and is_own[inputs[0].name] and is_own[inputs[1].name]:
                return True
        return False

    def _look_at_ratio(self, numerator: tf.Tensor, denominator: tf.Tensor) -> str | list[tf.Tensor]:
        summed = self._sum_behind(numerator)
        if self._varies(denominator):
            if not self._is_count(denominator) or self._counts_selected_rows(denominator):
                return FUNCTION
            if summed is None:
                return [numerator]
            return SUM_OVER_ROWS if summed.name in self._sums else []
        value = value_of(denominator)
        if summed is not None and summed.name not in self._sums and value is not None and value.size == 1:
            shape = summed.op.inputs[0].shape
            if shape.is_fully_defined() and float(value) in (shape[0], shape.num_elements()):
                return []  # the rank's own number of rows, or of elements
        return [numerator]

    def _sum_behind(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns the sum over rows that `tensor` is, but for factors that no row changes; or one of several that it adds up."""
        while True:
            op = tensor.op
            if tensor.name in self._sums or op.type in _SUMMING and self._is_over_rows(op.inputs[0]):
                return tensor
            varying = [x for x in op.inputs if self._varies(x)]
            names = {x.name for x in varying}
            if op.type in _ADDING and all(x.name in names or is_zero(x) for x in op.inputs):
                sums = [self._sum_behind(x) for x in varying]
                is_known = [x is not None and x.name in self._sums for x in sums]
                return sums[0] if all(x is not None for x in sums) and len(set(is_known)) == 1 else None
            is_passed = op.type in _MULTIPLYING | {"Cast", "Identity", "Neg", "StopGradient"}
            if tensor.name in self._means or not is_passed or len(varying) != 1:
                return None
            tensor = varying[0]

    def _is_over_rows(self, x: tf.Tensor) -> bool:
        """Whether `x` has rows: a size that is not known before the step runs, or as many as the rank's batch."""
        if x.op.type == "Pack" and x.op.get_attr("axis") == 0:
            return False  # several losses, as many as there are
        if x.shape.rank is None or not x.shape.is_fully_defined():
            return True
        return bool(x.shape.rank) and self._varies(x) and has_rows(x, self._program)

    def _is_count(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` depends on the shapes of the batch alone."""
        return not any(x.name in self._arguments for x, _ in self._before(tensor, lambda op: op.type in _COUNTING))

    def _counts_selected_rows(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor`, computed of the shapes of the batch, is computed of how many rows satisfy a condition."""
        found = (x.op for x, _ in self._before(tensor, lambda op: op.type in _COUNTING) if x.op.type in _COUNTING)
        return any(has_selected_rows(x, self._results) for op in found for x in op.inputs)

    def _is_same_on_all(self, op: tf.Operation) -> bool:
        return op.name in self._same_on_all or self._is_of_weights(op)

    def _is_of_weights(self, op: tf.Operation) -> bool:
        """Whether `op` is of a gradient by weights, or by a number: not by rows."""
        return tape.is_backward(op) and not any(
            x.shape.rank is None or not x.shape.is_fully_defined() or has_rows(x, self._program) for x in op.outputs
        )

    def _varies(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` depends on the batch, and so may differ between ranks."""
        of: dict[str, str | None] = {}
        for x, reader in self._before(tensor, self._is_same_on_all):
            of[x.name] = reader
            if x.name in self._arguments or x.name in self._varying or x.name in self._means or x.name in self._sums:
                name: str | None = x.name
                while name is not None:
                    self._varying.add(name)
                    name = of[name]
                return True
        self._same_on_all.update(name.rpartition(":")[0] for name in of)
        return False

    def _before(self, tensor: tf.Tensor, is_end: Callable[[tf.Operation], bool]) -> Iterator[tuple[tf.Tensor, str | None]]:
        return before(tensor, is_end, self._results.own_inputs_of)

    def _computed_of(self, tensor: tf.Tensor) -> Sequence[tf.Tensor]:
        """Returns what the numbers of `tensor` are computed of; nothing where other data ranks have sent them."""
        op = tensor.op
        if op.type.endswith("CandidateSampler"):  # it draws classes at random, and is given those of the rows to count them
            return []
        return _looked_up_last(op) or ([] if op.type in _COUNTING else self._results.own_inputs_of(tensor))


def _looked_up_last(op: tf.Operation) -> list[tf.Tensor]:
    """Returns the table and the ids, where `op` slices off what was looked up for the last of two lists of ids; else nothing.

    `tf.nn.sampled_softmax_loss` and `tf.nn.nce_loss` look the classes of the rows and the sampled ones up together.
    """
    if op.type != "Slice":
        return []
    begin, looked_up = tf.get_static_value(op.inputs[1]), op.inputs[0].op
    while looked_up.type == "Identity":
        looked_up = looked_up.inputs[0].op
    if begin is not None and not begin[0] or looked_up.type not in ("GatherV2", "ResourceGather"):
        return []
    ids = looked_up.inputs[1].op
    is_of_two = ids.type == "ConcatV2" and len(ids.inputs) == 3  # the axis is last
    return [looked_up.inputs[0], ids.inputs[1]] if is_of_two else []
