"""What one device would assign to a variable in a step: the value that a rank has computed, computed of the global batch.

A codebook, a queue of keys, a count of examples, a running variance, weights without an optimizer: a rank computes the new value
of its own rows. From that value back to the nearest tensors of which the global batch's are known, and forward again:

    a sum over rows                              the sum over the ranks
    a mean over rows, a loss                     the mean over the ranks, weighted by rows
    a largest, a smallest over rows              that of all ranks
    rows                                         the rows of all ranks, in their order
    a gradient                                   what is written is the sum, or the rank's summand (`tape_gradients`)
    what does not depend on rows                 itself
    all else                                     the same operation, of what its inputs are of the global batch

So `0.9 * m + 0.1 * ops.mean(x, 0)` costs one message of the mean, and `ops.concatenate([keys, queue])[:size]` the gathered keys.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives import RankProgram, all_reduce
from tfdist.collectives.rows import can_be_gathered, gather_rows
from tfdist.graphs import tape
from tfdist.graphs.constants import value_of
from tfdist.losses.row_means import RowMeans
from tfdist.losses.trainer_step import TrainerStep
from tfdist.optimizers.tape_gradients import TapeGradients
from tfdist.sharding import gradient_graph
from tfdist.sharding.gradient_stubs import GradientStubs
from tfdist.sharding.row_kinds import RowKind, RowKinds, argument_kinds, of_collective, reduced_axes

_MOST_OPERATIONS = 100  # that are made again for one value: not a network
_LABEL = "statistics/batch"


class NotKnownError(Exception):
    """What a tensor is of the global batch cannot be told."""


class BatchValues:
    """What tensors of one rank are of the global batch, in one trace; an attachment of the rank's program."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._kinds = RowKinds(self._kind_of_source, trusts_loops=True)
        self._of_batch: dict[str, tf.Tensor] = {}
        self._arguments = argument_kinds(program)
        leaves = [x for x in tf.nest.flatten(program.arguments) if isinstance(x, tf.Tensor) and tf.is_symbolic_tensor(x)]
        static = {leaf.shape[0] for leaf in leaves if self._arguments[leaf.name] is RowKind.ROWS}
        self._static_rows = static.pop() if len(static) == 1 else None

    def depends_on_rows(self, tensor: tf.Tensor) -> bool:
        return self._kinds.kind(tensor) is not RowKind.SAME

    def is_of_gradients(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is computed of gradients of parameters."""
        program, gradients = self._program, self._program.attachment(TapeGradients)
        of_wholes = gradient_graph.Sources(lambda x: x.graph is program.graph and gradients.is_gradient(x)).of(tensor)
        return bool(of_wholes or program.attachment(GradientStubs).below(tensor))

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what `tensor`, which exists where all ranks run, is of the global batch; the same on all ranks.

        Raises:
            NotKnownError: that cannot be told.
        """
        self._left = _MOST_OPERATIONS
        with self._program.outermost(), tape.stop_recording():
            try:
                return self._of(tensor)
            except ValueError as error:  # an operation that does not take another number of rows
                raise NotKnownError(str(error)) from error

    def _of(self, tensor: tf.Tensor) -> tf.Tensor:
        kind = self._kinds.kind(tensor)
        if kind is RowKind.SAME:
            return tensor
        if tensor.name not in self._of_batch:
            self._of_batch[tensor.name] = self._found(tensor, kind)
        return self._of_batch[tensor.name]

    def _found(self, tensor: tf.Tensor, kind: RowKind) -> tf.Tensor:
        if self._program.attachment(RowMeans).is_mean(tensor):
            step = self._program.attachment(TrainerStep)
            if step.model is None:
                raise NotKnownError("a loss in a loop of one's own")
            return _mean(tensor, step.weight())
        if kind is RowKind.SUM:
            return _reduced(tensor, "sum")
        if kind is RowKind.ROWS:
            return self._gathered(tensor)
        op = tensor.op
        if op.type in ("Max", "Mean", "Min") and self._is_over_rows(op):
            if op.type == "Mean":
                return _mean(tensor, tf.shape(op.inputs[0])[0])
            return _reduced(tensor, op.type.lower())
        if op.type == "Shape" and kind is RowKind.LENGTHS:
            return tf.concat([_reduced(tensor[:1], "sum"), tensor[1:]], 0)
        if self._is_own_mean(op):
            return self._of(op.inputs[0]) / (op.inputs[1] * len(self._program.group_ranks("data")))
        self._left -= 1
        if self._left < 0 or not tape.can_be_made_again(op):
            raise NotKnownError(f"{op.type} {op.name!r}")
        return tape.with_inputs(op, [self._of(source) for source in op.inputs]).outputs[tensor.value_index]

    def _gathered(self, tensor: tf.Tensor) -> tf.Tensor:
        if not can_be_gathered(tensor):
            raise NotKnownError(f"rows of {tensor.dtype.name}")
        return gather_rows(tensor, _LABEL)

    def _is_over_rows(self, op: tf.Operation) -> bool:
        axes = reduced_axes(op.inputs[1], op.inputs[0].shape.rank)
        return axes is not None and 0 in axes and self._kinds.kind(op.inputs[0]) is RowKind.ROWS

    def _is_own_mean(self, op: tf.Operation) -> bool:
        """Whether `op` divides a sum by the number of the rank's own rows, a constant where every batch has as many."""
        if op.type != "RealDiv" or self._static_rows is None:
            return False
        value = value_of(op.inputs[1])
        is_count = value is not None and value.size == 1 and float(value) == self._static_rows
        return is_count and self._kinds.kind(op.inputs[0]) is RowKind.SUM

    def _kind_of_source(self, tensor: tf.Tensor) -> RowKind | tf.Tensor | None:
        op = tensor.op
        if tensor.name in self._arguments:
            return self._arguments[tensor.name]
        is_same = self._program.attachment(RowMeans).is_taken_for_same(tensor)
        if is_same or op.type in ("Placeholder", "ReadVariableOp"):
            return RowKind.SAME
        if (found := of_collective(tensor, self._program)) is not None:
            return found
        if self._program.attachment(TapeGradients).is_gradient(tensor):
            return RowKind.SAME
        if "Random" in op.type:
            return RowKind.OTHER if tensor.shape.is_fully_defined() else RowKind.ROWS
        if self._program.attachment(RowMeans).is_mean(tensor) or self._is_own_mean(op):
            return RowKind.OTHER
        return None


def _reduced(tensor: tf.Tensor, how: str) -> tf.Tensor:
    if not tensor.shape.is_fully_defined() or not (tensor.dtype.is_floating or tensor.dtype in (tf.int32, tf.int64)):
        raise NotKnownError(f"{tensor.dtype.name} of shape {tensor.shape}")
    return all_reduce(tensor, "data", reduce_op=how, label=_LABEL)


def _mean(tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Returns the mean of the ranks' values by weight. A mean of no rows is NaN, and counts nothing."""
    wide = tf.float64 if tensor.dtype == tf.float64 else tf.float32
    weight = tf.cast(weight, wide)
    share = tf.math.multiply_no_nan(tf.cast(tensor, wide), weight)
    if not tensor.shape.is_fully_defined():
        raise NotKnownError(f"a mean of shape {tensor.shape}")
    packed = tf.concat([tf.reshape(share, [-1]), tf.reshape(weight, [1])], 0)
    total = all_reduce(packed, "data", label=_LABEL)
    return tf.cast(tf.reshape(total[:-1], tensor.shape) / total[-1], tensor.dtype)
