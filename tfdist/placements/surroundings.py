"""The graph around an operation, as the repair of a step must see it: readers, and sizes."""

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.graphs import tape
from tfdist.graphs.walks import before, reached
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import How, Partial, Unknown
from tfdist.placements.table import Linear, row_of

_MOST_ROWS = 1024  # of a rank, where their number is not known when the step is traced


def readers_of(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Returns `operations` and those that read what they return, and so on."""
    return list(reached(operations, lambda op: [one for x in op.outputs for one in x.consumers()]))


def reads_variables(tensor: tf.Tensor) -> bool:
    """Whether `tensor` is computed of a variable that is read in its graph."""
    return any(x.op.type == "ReadVariableOp" for x in before(tensor))


def goes_on_linearly(op: tf.Operation, facts: Facts) -> bool:
    """Whether all that is computed of what `op` returns is linear in it, as far as the graph has come.

    What is divided by the number of replicas is not: it is the same on all ranks. Nor is what is divided by a number of all rows,
    or multiplied: that is a number of all rows, too.
    """
    waiting, seen = list(op.outputs), {x.name for x in op.outputs}
    for x in waiting:
        for reader in (one for one in x.consumers() if not tape.is_backward(one)):
            linear = row_of(reader.type).linear
            reads = [y.name in seen for y in reader.inputs]
            is_passed_on = reader.type == "IdentityN" or linear is Linear.TOGETHER
            if any(facts.of(y) == Partial(How.REPLICAS) for y in reader.inputs):
                return False
            others = [facts.of(y) for y, is_read in zip(reader.inputs, reads, strict=True) if not is_read]
            if not is_passed_on and any(isinstance(one, Partial | Unknown) for one in others):
                return False
            if not is_passed_on and (linear is None or not linear.holds(reads)):
                return False
            new = [y for y in reader.outputs if y.name not in seen]
            waiting.extend(new)
            seen.update(y.name for y in new)
    return True


def is_size(op: tf.Operation, place: int) -> bool:
    """Whether the input number `place` of `op`, or what follows from it, says how large something is: own rows then fit it."""
    if not op.inputs[place].dtype.is_integer:
        return False
    waiting, seen = [(op, place)], set()
    for reader, at in waiting:
        if at in row_of(reader.type).sizes:
            return True
        for x in (x for x in reader.outputs if x.dtype.is_integer and x.name not in seen):
            seen.add(x.name)
            waiting.extend((one, where) for one in x.consumers() for where, y in enumerate(one.inputs) if tape.same(x, y))
    return False


def bytes_of(tensor: tf.Tensor, row_axis: int) -> int:
    """Returns the bytes of `tensor` on a rank; of sizes that are not known, those that they may have."""
    sizes = [size or (_MOST_ROWS if axis == row_axis else 64) for axis, size in enumerate(tensor.shape)]
    return math.prod(sizes) * tensor.dtype.size
