"""A warning, once, where sums over the ranks are summed again: what is computed of the batch's gradients is the same on all.

grads, norm = strategy.run(...)                 gradients are the ranks' own, the norm is that of their sum
strategy.reduce("SUM", grads[0], axis=None)     the sum
strategy.reduce("SUM", norm, axis=None)         the norm, as many times as there are replicas: told
strategy.reduce("MEAN", norm, axis=None)        the norm
strategy.reduce("SUM", norm * is_first, ...)    the norm, where replicas but the first return zeros
strategy.reduce("SUM", rmse, axis=None)         once: the replicas have agreed on the mean that it is computed of
"""

import weakref
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.repair import Repair
from tfdist.sharding.gradient_graph import is_zero
from tfdist.sharding.known_sums import KnownSums
from tfdist.sharding.tape_gradients import TapeGradients

_MARK = "_tfdist_is_of_sums"
_AGREED = "_tfdist_is_agreed"
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def agreed(outputs: Any, program: RankProgram) -> Any:
    """Returns the `outputs` of the function of a custom training loop, with numbers of the whole batch marked as such: what needs
    the rows of all ranks, and the greatest and smallest of these."""
    is_alone = program.is_eager or program.mesh.size("data") == 1 or program.mesh.splits_layers
    if is_alone or program.part(RankRows).are_means:
        return outputs
    repair = program.part(Repair)

    def found(x: Any) -> Any:
        if not (tf.is_symbolic_tensor(x) and x.dtype.is_floating and x.shape.rank == 0 and program.exists_here(x)):
            return x
        x = repair.without_extremes(x, "returned")
        if repair.counts_once(x):
            x = tf.identity(repair.as_whole(x, "returned"))
            setattr(x, _AGREED, True)
        return x

    return tf.nest.map_structure(found, outputs)


def mark(outputs: Any, program: RankProgram) -> None:
    """Marks those of the `outputs` of a rank's function that are computed of sums of gradients."""
    for output in tf.nest.flatten(outputs):
        if not (isinstance(output, tf.Tensor) and output.dtype.is_floating):
            continue
        if program.is_eager:
            is_of_sums = program.part(KnownSums).is_of_sums(output)
        else:
            of_tapes = program.part(TapeGradients)
            is_of_sums = tf.is_symbolic_tensor(output) and of_tapes.is_of_sums(output) and not _is_masked(output)
        if is_of_sums:
            setattr(output, _MARK, True)


def _is_masked(output: tf.Tensor) -> bool:
    """Whether `output` is a product with zeros, or chosen by what is known: a replica's that leaves it to another."""
    while output.op.type == "Identity":
        output = output.op.inputs[0]
    op = output.op
    if op.type in ("Select", "SelectV2"):
        return tf.get_static_value(op.inputs[0]) is not None
    return op.type in ("Mul", "MulNoNan") and any(map(is_zero, op.inputs))


def as_reduced(reduce_op: tf.distribute.ReduceOp, value: Any, strategy: tf.distribute.Strategy) -> tf.distribute.ReduceOp:
    """Returns how `value`, of the replicas, is reduced where `reduce_op` is asked for: a number of the whole batch counts once.

    Warns, once for `strategy`, if what is about to be summed is marked.
    """
    parts = value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)
    if reduce_op == tf.distribute.ReduceOp.SUM and all(getattr(part, _AGREED, False) for part in parts):
        return tf.distribute.ReduceOp.MEAN
    is_marked = len(parts) > 1 and all(getattr(part, _MARK, False) for part in parts)
    if reduce_op == tf.distribute.ReduceOp.SUM and is_marked and strategy not in _told:
        _told.add(strategy)
        errors.warn(
            "What `strategy.run` has returned is computed of the gradients of the whole batch, and the same on all replicas. "
            "Summed, it counts as many times as there are replicas.",
            fix='Reduce it by `"MEAN"`; or return the gradient as it left the tape, or scaled, which is each replica\'s summand.',
        )
    return reduce_op
