"""How long each tensor of a traced step is in memory, in the order in which TensorFlow's executor runs the operations.

A tensor is freed when the last operation that reads it has run. So the order decides what is there at once, and it differs from
the order of the trace: see `execution_order`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
import tensorflow as tf

from tfdist.graphs import tape
from tfdist.pipeline.stages.flops import flops_of_operation
from tfdist.planning import operations
from tfdist.planning.execution_order import CHANCE, THREADS, execution_order
from tfdist.planning.graph_optimizer import pushed_down, unchanged


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


class Sweep:
    """A graph that is ready to be swept, at any size of the batch.

    Args:
        graphs: traces of one program, for two sizes of the batch: sizes between and beyond follow a line.
        batch_sizes: their sizes.
        results: the names of the tensors that are kept to the end.
        effects: the names of operations that run besides those that the results need.
        is_one_graph: whether forward and backward run in one graph, in which TensorFlow's graph optimizer may move operations
            from one to the other.
        on_gpu: whether a GPU runs it, whose operations all cost the executor little: one thread hands them over, first in first
            out.

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
        on_gpu: bool = False,
    ):
        every = [graph.get_operations() for graph in graphs]
        kinds = [[one.type for one in ops] for ops in every]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError("The traces differ in their operations.")
        ops = every[0]
        numbers = {one: number for number, one in enumerate(ops)}
        roots = [graphs[0].get_tensor_by_name(name) for name in results]
        roots += [graphs[0].get_operation_by_name(name) for name in effects]
        needed = tape.ancestors(roots, ops)
        needed |= {one if isinstance(one, tf.Operation) else one.op for one in roots}
        self.ops = ops
        self.count = len(ops)
        self.runs = [one in needed for one in ops]
        self.results = list(results)
        tensors: dict[str, int] = {}
        self.outputs: list[list[int]] = []
        for one in ops:
            self.outputs.append([tensors.setdefault(x.name, len(tensors)) for x in one.outputs])
        self.tensors = tensors
        inputs = {one: list(one.inputs) for one in ops} | dict(pushed_down(ops) if is_one_graph else ())
        self.inputs = [[tensors[x.name] for x in inputs[one]] for one in ops]
        self.before = [sorted({numbers[x.op] for x in inputs[one]} | {numbers[x] for x in one.control_inputs}) for one in ops]
        self.aliases = [
            [_alias_of(one, number) if self.runs[place] else None for number in range(len(one.outputs))]
            for place, one in enumerate(ops)
        ]
        self._on_gpu = on_gpu
        self._called: dict[str, int] = {}
        self._travels = {place for place, one in enumerate(ops) if operations.travels(one)}
        self._batch_sizes = (batch_sizes[0], batch_sizes[-1])
        self._measured = [self._measure(one) for one in (every[0], every[-1])]
        self.unknown = self._measured[0][1]

    def _measure(self, ops: Sequence[tf.Operation]) -> tuple[list[np.ndarray], int]:
        """Returns, of one trace, bytes by tensor, bytes of scratch and FLOPs by operation; and how many sizes are not known."""
        sizes: list[int | None] = []
        for place, one in enumerate(ops):
            sizes.extend(operations.output_bytes(one) if self.runs[place] else [0] * len(one.outputs))
        scratch = [self._scratch_bytes(one) if self.runs[place] else 0 for place, one in enumerate(ops)]
        flops = [flops_of_operation(one) if self.runs[place] else 0 for place, one in enumerate(ops)]
        known = [np.array([size or 0 for size in sizes], float), np.array(scratch, float), np.array(flops, float)]
        return known, sum(size is None for size in sizes)

    def _scratch_bytes(self, operation: tf.Operation) -> int:
        """Returns the bytes that an operation holds while it runs, besides its inputs and outputs: of a call its function's."""
        called = tape.called(operation)
        if called is None:
            return operations.scratch_bytes(operation)
        if called.name not in self._called:
            effects = [one.name for one in called.control_outputs]
            inside = Sweep([called], [1], [x.name for x in called.outputs], effects, on_gpu=self._on_gpu)
            results = sum(operations.tensor_bytes(x) or 0 for x in called.outputs)
            self._called[called.name] = max(int(inside.at(1).live().max(initial=0)) - results, 0)
        return self._called[called.name]

    def at(self, batch_size: int, chance: float = CHANCE) -> Buffers:
        """Returns the buffers of a run with so many examples; `chance` as for `execution_order`."""
        first, last = self._batch_sizes
        part = (batch_size - first) / (last - first) if last > first else 0.0
        pairs = zip(self._measured[0][0], self._measured[1][0], strict=True)
        sizes, scratch, flops = (np.maximum(np.rint(low + (high - low) * part), 0).astype(np.int64) for low, high in pairs)
        return self._run(sizes, scratch, flops, chance)

    def flops(self, batch_size: int) -> np.ndarray:
        """Returns the FLOPs of each operation with so many examples, float64 (operations,)."""
        first, last = self._batch_sizes
        low, high = self._measured[0][0][2], self._measured[1][0][2]
        return low + (high - low) * (batch_size - first) / max(last - first, 1)

    def _run(self, sizes: np.ndarray, scratch: np.ndarray, flops: np.ndarray, chance: float) -> Buffers:
        steps, ends = self._order(sizes, flops, chance)
        reads = np.zeros(len(self.tensors), np.int64)
        for place in steps:
            for tensor in self.inputs[place]:
                reads[tensor] += 1
        kept = {self.tensors[name] for name in self.results}
        for tensor in kept:
            reads[tensor] += 1
        held = np.full(len(self.tensors), -1, np.int64)  # the buffer that holds a tensor
        waiting: list[int] = []  # by buffer, how often it will be read
        found: list[int] = []  # by buffer, its bytes
        births: list[int] = []
        deaths: list[int] = []
        makers: list[int] = []
        readers: list[list[int]] = []

        def made(size: int, step: int, place: int) -> int:
            for values, value in ((found, size), (births, step), (deaths, ends[step]), (makers, place), (waiting, 0)):
                values.append(value)
            readers.append([])
            return len(found) - 1

        for step, place in enumerate(steps):
            own = self.inputs[place]
            for number, tensor in enumerate(self.outputs[place]):
                alias = self.aliases[place][number]
                if alias is not None and alias < len(own):
                    buffer = int(held[own[alias]])
                else:
                    buffer = self._taken_over(place, number, sizes, held, waiting, found)
                if alias is None and buffer < 0 and sizes[tensor]:
                    buffer = made(int(sizes[tensor]), step, place)
                held[tensor] = buffer
                if buffer >= 0:
                    waiting[buffer] += int(reads[tensor])
            if scratch[place]:
                made(int(scratch[place]), step, place)
            for tensor in own:
                buffer = int(held[tensor])
                if buffer >= 0:
                    waiting[buffer] -= 1
                    readers[buffer].append(place)
                    deaths[buffer] = max(deaths[buffer], ends[step])
        for tensor in kept:
            if held[tensor] >= 0:
                deaths[int(held[tensor])] = len(steps)
        holding = {name: int(held[self.tensors[name]]) for name in self.results}
        sized, born, died, by = (np.array(values, np.int64) for values in (found, births, deaths, makers))
        return Buffers(sized, born, died, by, readers, steps, holding)

    def _taken_over(
        self, place: int, number: int, sizes: np.ndarray, held: np.ndarray, waiting: list[int], found: list[int]
    ) -> int:
        """Returns the buffer of an input that the output may be written into; -1: none."""
        operation, own = self.ops[place], self.inputs[place]
        if not operations.may_take_over(operation) or number != operations.taking_output(operation):
            return -1
        size = sizes[self.outputs[place][number]]
        for tensor in own:
            buffer = int(held[tensor])
            if buffer >= 0 and found[buffer] == size and sum(held[other] == buffer for other in own) == waiting[buffer]:
                return buffer
        return -1

    def _order(self, sizes: np.ndarray, flops: np.ndarray, chance: float) -> tuple[list[int], list[int]]:
        moved = [float(sum(sizes[x] for x in (*self.inputs[place], *self.outputs[place]))) for place in range(self.count)]
        inline = [self._on_gpu or operations.is_inline(self.ops[place], moved[place]) for place in range(self.count)]
        seconds = [
            operations.travel_seconds(moved[place])
            if place in self._travels
            else operations.seconds_of(moved[place], float(flops[place]))
            for place in range(self.count)
        ]
        threads = 1 if self._on_gpu else THREADS
        return execution_order(self.before, self.runs, inline, seconds, self._travels, threads, chance)


def _alias_of(operation: tf.Operation, number: int) -> int | None:
    alias = operations.alias_of(operation, number)
    return unchanged(operation) if alias is None else alias
