"""How long each tensor of a traced step is in memory.

A tensor is freed when the last operation that reads it has run. So the order of the operations decides what is there at once. It
is about that of TensorFlow's executor, which differs from that of the trace: what has become ready runs, first in first out, and
what backward needs of forward's tensors alone in forward. As another thread goes on meanwhile, what a large operation reads is
there until the next one has begun.
"""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.graphs import tape
from tfdist.tools.planning import operations

# What makes less is so short that it ends before another thread begins with something.
_LARGE_BYTES = 2**16


@dataclasses.dataclass(frozen=True, eq=False)
class Buffers:
    """The buffers of one run of a graph.

    Attributes:
        sizes: bytes of each, int64 (buffers,).
        births: the step in which it is made.
        deaths: the last step in which it is there; the number of steps for what the graph returns.
        makers: the number, among all operations of the graph, of the one that makes it.
        readers: the numbers of those that read it.
        steps: the numbers of operations in the order in which they run.
        holding: for tensors that were asked for, by name, the buffer that holds them.
    """

    sizes: np.ndarray
    births: np.ndarray
    deaths: np.ndarray
    makers: np.ndarray
    readers: list[list[int]]
    steps: list[int]
    holding: dict[str, int]

    def live(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """Returns the bytes in memory during each step, of all buffers or of those that a mask chooses."""
        chosen = np.ones(len(self.sizes), bool) if chosen is None else chosen
        changes = np.zeros(len(self.steps) + 2, np.int64)
        np.add.at(changes, self.births[chosen], self.sizes[chosen])
        np.add.at(changes, self.deaths[chosen] + 1, -self.sizes[chosen])
        return np.cumsum(changes)[: len(self.steps)]


@dataclasses.dataclass(eq=False)
class _Buffer:
    """A buffer while the graph is swept: as in `Buffers`, and how often it will be read yet."""

    size: int
    birth: int
    death: int
    maker: int
    waiting: int = 0
    readers: list[int] = dataclasses.field(default_factory=list)


class Sweep:
    """A graph that is ready to be swept, at any size of the batch.

    Args:
        graphs: traces of one program, for two sizes of the batch: sizes between and beyond follow a line.
        batch_sizes: their sizes.
        results: the names of the tensors that are kept to the end.
        effects: the names of operations that run besides those that the results need.
        is_one_graph: whether forward and backward run in one graph, in which TensorFlow's graph optimizer may move operations
            from one to the other.

    Attributes:
        unknown: how many tensors have sizes that are known only when they are computed: they count nothing.

    Raises:
        ValueError: the traces are not of one program.
    """

    def __init__(
        self,
        graphs: Sequence[tf.Graph],
        batch_sizes: Sequence[int],
        results: Collection[str],
        effects: Collection[str] = (),
        is_one_graph: bool = True,
    ):
        every = [graph.get_operations() for graph in graphs]
        ops = every[0]
        if any([one.type for one in other] != [one.type for one in ops] for other in every):
            raise ValueError("The traces differ in their operations.")
        numbers = {one: number for number, one in enumerate(ops)}
        roots = [graphs[0].get_tensor_by_name(name) for name in results]
        roots += [graphs[0].get_operation_by_name(name) for name in effects]
        needed = tape.ancestors(roots, ops)
        self.ops = ops
        self.runs = [one in needed for one in ops]
        tensors: dict[str, int] = {}
        self._outputs = [[tensors.setdefault(x.name, len(tensors)) for x in one.outputs] for one in ops]
        self._results = {name: tensors[name] for name in results}
        inputs = {one: list(one.inputs) for one in ops} | dict(_pushed_down(ops) if is_one_graph else ())
        self._inputs = [[tensors[x.name] for x in inputs[one]] for one in ops]
        self.before = [sorted({numbers[x.op] for x in inputs[one]} | {numbers[x] for x in one.control_inputs}) for one in ops]
        self._steps = self._order()
        self._aliases = [
            [_alias_of(one, number) if runs else None for number in range(len(one.outputs))]
            for one, runs in zip(ops, self.runs, strict=True)
        ]
        self._called: dict[str, int] = {}
        self._batch_sizes = batch_sizes
        self._measured, unknown = zip(*(self._measure(one) for one in (every[0], every[-1])), strict=True)
        self.unknown = unknown[0]

    def _order(self) -> list[int]:
        """Returns the numbers of the operations that run, in order."""
        after: list[list[int]] = [[] for _ in self.ops]
        missing = [len(others) for others in self.before]
        for place in np.flatnonzero(self.runs).tolist():
            for other in self.before[place]:
                after[other].append(place)
        order = [place for place, runs in enumerate(self.runs) if runs and not missing[place]]
        for place in order:  # which grows
            for other in after[place]:
                missing[other] -= 1
                if not missing[other]:
                    order.append(other)
        return order

    def _ends(self, sizes: np.ndarray) -> list[int]:
        """Returns for each step the last that begins before it ends: of one that makes a large tensor, the next such one."""
        made = [zip(self._outputs[place], self._aliases[place], strict=True) for place in self._steps]
        most = [max((sizes[tensor] for tensor, alias in pairs if alias is None), default=0) for pairs in made]
        ends = list(range(len(most)))
        for step, following in itertools.pairwise(np.flatnonzero(np.array(most) >= _LARGE_BYTES).tolist()):
            ends[step] = following
        return ends

    def _measure(self, ops: Sequence[tf.Operation]) -> tuple[list[np.ndarray], int]:
        """Returns, of one trace, bytes by tensor, and of scratch by operation; and how many sizes are not known."""
        ran = list(zip(ops, self.runs, strict=True))
        sizes = [size for one, runs in ran for size in (operations.output_bytes(one) if runs else [0] * len(one.outputs))]
        scratch = [self._scratch_bytes(one) if runs else 0 for one, runs in ran]
        return [np.array([size or 0 for size in one], float) for one in (sizes, scratch)], sizes.count(None)

    def _scratch_bytes(self, operation: tf.Operation) -> int:
        """Returns the bytes that an operation holds while it runs, besides its inputs and outputs: of a call its function's."""
        called = tape.called(operation)
        if called is None:
            return operations.scratch_bytes(operation)
        if called.name not in self._called:
            effects = [one.name for one in called.control_outputs]
            inside = Sweep([called], [1], [x.name for x in called.outputs], effects)
            results = sum(operations.tensor_bytes(x) or 0 for x in called.outputs)
            self._called[called.name] = max(int(inside.at(1).live().max(initial=0)) - results, 0)
        return self._called[called.name]

    def at(self, batch_size: int) -> Buffers:
        """Returns the buffers of a run with so many examples."""
        figures = (between(pair, self._batch_sizes, batch_size) for pair in zip(*self._measured, strict=True))
        sizes, scratch = (np.rint(one).astype(np.int64) for one in figures)
        steps, ends = self._steps, self._ends(sizes)
        reads = collections.Counter(tensor for place in steps for tensor in self._inputs[place])
        reads.update(self._results.values())
        held: dict[int, _Buffer | None] = {}  # by tensor
        made: list[_Buffer] = []
        for step, place in enumerate(steps):
            own = self._inputs[place]
            for number, tensor in enumerate(self._outputs[place]):
                alias = self._aliases[place][number]
                buffer = self._taken_over(place, number, sizes, held) if alias is None else held[own[alias]]
                if alias is None and buffer is None and sizes[tensor]:
                    buffer = _Buffer(sizes[tensor], step, step, place)
                    made.append(buffer)
                held[tensor] = buffer
                if buffer is not None:
                    buffer.waiting += reads[tensor]
            if scratch[place]:
                made.append(_Buffer(scratch[place], step, step, place))
            for buffer in (held[tensor] for tensor in own):
                if buffer is not None:
                    buffer.waiting -= 1
                    buffer.readers.append(place)
                    buffer.death = max(buffer.death, ends[step])
        holding = {name: held[tensor] for name, tensor in self._results.items()}
        for buffer in holding.values():
            if buffer is not None:
                buffer.death = len(steps)
        numbers: dict[_Buffer | None, int] = {None: -1} | {one: number for number, one in enumerate(made)}
        rows = np.array([(one.size, one.birth, one.death, one.maker) for one in made], np.int64).reshape(-1, 4)
        readers, held_by = [one.readers for one in made], {name: numbers[one] for name, one in holding.items()}
        sized, born, died, by = rows.T
        return Buffers(sized, born, died, by, readers, steps, held_by)

    def _taken_over(self, place: int, number: int, sizes: np.ndarray, held: Mapping[int, _Buffer | None]) -> _Buffer | None:
        """Returns the buffer of an input that the output may be written into; None: there is none."""
        operation, own = self.ops[place], [held[tensor] for tensor in self._inputs[place]]
        if number == operations.taking_output(operation):
            size = sizes[self._outputs[place][number]]
            for one in own:
                if one is not None and one.size == size and own.count(one) == one.waiting:
                    return one
        return None


def between(figures: Any, batch_sizes: Sequence[int], batch_size: float) -> Any:
    """Returns what `figures` of two traces are for so many examples: on the line through both, and at least 0."""
    low, high = batch_sizes[0], batch_sizes[-1]
    return np.maximum(figures[0] + (figures[1] - figures[0]) * (batch_size - low) / max(high - low, 1), 0)


def _alias_of(operation: tf.Operation, number: int) -> int | None:
    alias = operations.alias_of(operation, number)
    return _unchanged(operation) if alias is None else alias


# What TensorFlow's graph optimizer changes in a step before it runs, as far as it moves memory:
#
#     C * (X * Y)  becomes  X * (C * Y)    a constant is pushed down (Grappler's constant folding, `ConstantPushDown`)
#     1 * X        becomes  X              (`SimplifyArithmeticOperations`)
#
# The gradient of attention ends so: C is the scale of the scores, Y their softmax. C * Y is computed as soon as there is Y, in
# forward, and kept beside it for backward. In a pipeline forward and backward of a stage are functions of their own: what one of
# them computes is not moved to the other. A product with one is in the gradient of swish, `tf.nn.silu`, whose slope is one.
def _pushed_down(operations: Sequence[tf.Operation]) -> Iterator[tuple[tf.Operation, list[tf.Tensor]]]:
    """Yields the operations whose inputs change, with their new inputs."""
    for parent in operations:
        if parent.type != "Mul" or len(parent.inputs) != 2:
            continue
        constant, product = sorted(parent.inputs, key=lambda x: x.op.type != "Const")
        child = product.op
        if constant.op.type != "Const" or constant.shape.rank != 0 or child.type != "Mul":
            continue
        x, y = child.inputs
        if "Const" in (x.op.type, y.op.type) or not _are_alike(x, y, product, parent.outputs[0]):
            continue
        if len(product.consumers()) == 1:
            yield child, [constant, y]
            yield parent, [x, product]


def _unchanged(operation: tf.Operation) -> int | None:
    """Returns the number of the input that the operation returns as it is; None: it computes."""
    if operation.type != "Mul" or len(operation.inputs) != 2:
        return None
    for number, factor in enumerate(operation.inputs):
        is_scalar = factor.op.type == "Const" and factor.shape.rank == 0
        if is_scalar and tf.get_static_value(factor) == 1 and _are_alike(operation.inputs[1 - number], operation.outputs[0]):
            return 1 - number
    return None


def _are_alike(*tensors: tf.Tensor) -> bool:
    return len({tuple(x.shape) for x in tensors}) == 1 and tensors[0].shape.is_fully_defined()
