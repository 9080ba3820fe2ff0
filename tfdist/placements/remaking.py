"""What is computed of gathered rows, where the trace knows how many rows a rank has: made again of those of all ranks.

An operation has the static sizes of what it was made of, and gradient functions read them. So each operation is made a second
time up to the first one that returns one number, a sum, which reads what was made. Code that has read a size itself
(`x.shape[0]`) has left it in the graph as a constant: nothing can be made again of that.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.collectives import OfBranch, RankProgram
from tfdist.graphs import records, tape
from tfdist.graphs.walks import before, inputs_first, reached
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import Shard
from tfdist.placements.redistribute import Redistribution
from tfdist.placements.surroundings import readers_of
from tfdist.placements.table import Kind, is_shape, row_of

_ARITHMETIC = ("AddV2", "FloorDiv", "FloorMod", "Mul", "Sub")

Change = tuple[tf.Operation, int, tf.Tensor]  # an operation, the number of one of its inputs, what it is to read there


class Remaking(OfBranch):
    """Operations that were made again in the graph of one rank's program. A part of its state, and of a branch's."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._facts = program.part(Facts)
        self._redistribution = program.part(Redistribution)
        self._new: dict[str, tf.Tensor] = {}  # what was made in the place of a tensor, by its name

    def now(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what was made in the place of `tensor`; itself, if nothing was."""
        while tensor.name in self._new:
            tensor = self._new[tensor.name]
        return tensor

    def op_now(self, op: tf.Operation) -> tf.Operation:
        """Returns what was made in the place of `op`; itself, if nothing was."""
        return self.now(op.outputs[0]).op if op.outputs else op

    def replace(self, old: tf.Tensor, new: tf.Tensor) -> None:
        """Lets `new`, computed of `old`, be read in its place."""
        for reader in [op for op in old.consumers() if not tape.is_backward(op) and new.op not in readers_of([op])]:
            for place in (place for place, x in enumerate(reader.inputs) if tape.same(x, old)):
                self._redistribution.reads(reader, place, new)
        self._new[old.name] = new

    def is_needed(self) -> bool:
        """Whether operations have static sizes that gathered rows do not have."""
        return bool(self._facts.local_static_rows)

    def can_be_made(self, operations: Sequence[tf.Operation], target: tf.Tensor) -> bool:
        """Whether what is computed of `operations`, up to `target`, bears other numbers of rows."""
        rows = self._facts.local_static_rows - {0}
        for op in self._between(operations, target):
            is_known = records.has_gradient(op) and op.type != "IdentityN" and not tape.is_backward(op)
            has_size = any(attribute.name in ("num", "num_split") for attribute in op.op_def.attr)
            if not is_known or not tape.can_be_made_again(op) or has_size:
                return False
            counts_axes = bool(op.inputs) and is_shape(op.inputs[0].op.type)
            places = () if counts_axes else row_of(op.type).sizes
            sizes = [x for place, x in enumerate(op.inputs) if place in places and x.dtype.is_integer]
            if any(map(self._may_be_of_rows, sizes, [op] * len(sizes))):
                return False
            # Integers after the first input may be axes, their order, or what is added along them.
            read = list(op.inputs)[: 1 if row_of(op.type).kind in (Kind.REDUCTION, Kind.SCAN, Kind.VIEW) else None]
            others = [x for x in read if not any(x is size for size in sizes)]
            if any(x.shape.rank and rows & set(x.shape.as_list()) and _is_constant(x) for x in others):
                return False  # as many numbers as a rank has rows
        return True

    def _may_be_of_rows(self, sizes: tf.Tensor, op: tf.Operation) -> bool:
        """Whether a constant among `sizes`, which `op` reads, may be a number of rows that Python has read, or a multiple."""
        rows, placement = self._facts.local_static_rows - {0}, self._facts.of(op.outputs[0])
        value = tf.get_static_value(sizes)
        if op.type in ("BroadcastTo", "Reshape") and isinstance(placement, Shard) and value is not None:
            return value[placement.axis] > 0
        is_cut = op.type in ("Slice", "StridedSlice")
        return any(
            size in rows or (size > 0 and not is_cut and any(size % n == 0 for n in rows - {1})) for size in _constants_in(sizes)
        )

    def read(self, changes: Sequence[Change], target: tf.Tensor) -> None:
        """Lets operations read what `changes` say, and makes what follows from them, up to `target`, of that."""
        if not self.is_needed():
            for op, place, new in changes:
                self._redistribution.reads(op, place, new)
            return
        reads = {(self.op_now(op).name, place): new for op, place, new in changes}
        operations = [one for op, _, _ in changes for one in (op, self.op_now(op))]
        for op in self._between(operations, target):
            if self.op_now(op) is not op:
                continue
            inputs = [reads.get((op.name, place), self.now(x)) for place, x in enumerate(op.inputs)]
            places = [place for place, x in enumerate(op.inputs) if not tape.same(inputs[place], x)]
            has_new_size = bool(row_of(op.type).sizes) and op not in self._redistribution.made
            if not places and not has_new_size:
                continue
            # Other integers may be sizes, which TensorFlow has found out when they were made.
            if all(x.dtype.is_floating and x.shape.rank == 0 for x in op.outputs):
                for place in places:
                    self._redistribution.reads(op, place, self._of_shape_like(inputs[place], op.inputs[place]))
                continue
            with self._program.outermost(), tape.stop_recording():
                made = tape.with_inputs(op, inputs)
            self._redistribution.note_made(made)
            self._new.update((old.name, new) for old, new in zip(op.outputs, made.outputs, strict=True))

    def _of_shape_like(self, new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
        """Returns `new` such that TensorFlow lets it be read in the place of `old`, of another static shape."""
        if new.shape.is_compatible_with(old.shape):
            return new
        return self._redistribution.make(lambda x: tf.compat.v1.placeholder_with_default(x, [None] * x.shape.rank), new)

    def _between(self, operations: Sequence[tf.Operation], target: tf.Tensor) -> list[tf.Operation]:
        """Returns `operations` and what reads them on the way to `target`, each after what it reads."""
        after = {op.name for op in readers_of(operations)}
        seen: set[str] = set()
        found: dict[str, tf.Operation] = {}
        for x in inputs_first(self.now(target), lambda x: list(x.op.inputs), seen):
            seen.add(x.name)
            if x.op.name in after:
                found[x.op.name] = x.op
        return list(found.values())


def _is_constant(tensor: tf.Tensor) -> bool:
    return all(x.op.inputs or x.op.type == "Const" for x in before(tensor))


def _constants_in(sizes: tf.Tensor) -> list[int]:
    """Returns the constants among `sizes`, integers: what was not read from the graph."""

    def read_by(x: tf.Tensor) -> list[tf.Tensor]:
        if is_shape(x.op.type):
            return []
        read = list(x.op.inputs)[: 1 if x.op.type == "StridedSlice" else None]
        if x.op.type in _ARITHMETIC and not all(y.op.type == "Const" for y in read):  # of what is read from the graph
            read = [y for y in read if y.op.type != "Const"]
        return [y for y in read if y.dtype.is_integer]

    constants = (x for x in reached([sizes], read_by) if x.op.type == "Const")
    return [number for x in constants for number in np.ravel(tf.get_static_value(x)).tolist()]
