"""Gathered parameters of one rank's step, and who reads them: what is gathered a second time for backward follows from that.

Note: views. A layer often reshapes, transposes or casts a weight before it multiplies with it; what backward holds is then the
view, which shares the weight's buffer or is as large. Operations that only move or cast a weight are made again on the second
copy. A loop hands a weight that it captured on to its gradient as one of its outputs: that is a view too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set
from typing import Any

import tensorflow as tf

from tfdist.sharding import tape
from tfdist.sharding.parameter_group import ParameterGroup

# Operations whose first input is only moved or cast.
VIEWS = frozenset(
    "BroadcastTo Cast ExpandDims Identity Pad Reshape Slice Split SplitV Squeeze StopGradient StridedSlice Transpose "
    "Unpack".split()
)


@dataclasses.dataclass(frozen=True)
class Reader:
    """An operation that reads `tensor`: the gathered variable of id `variable`, or a view of it."""

    operation: tf.Operation
    tensor: tf.Tensor
    variable: int


def readers_of(tensor: tf.Tensor, variable: int) -> Iterator[Reader]:
    """Yields who reads `tensor`, the gathered variable of id `variable`, or a view of it."""
    for operation in tensor.consumers():
        if tape.is_backward(operation):
            yield Reader(operation, tensor, variable)
        elif operation.type in VIEWS and tape.same(operation.inputs[0], tensor):
            for view in operation.outputs:
                yield from readers_of(view, variable)
        else:
            yield Reader(operation, tensor, variable)
            for passed in tape.loop_invariants(operation, tensor):
                yield from readers_of(passed, variable)


@dataclasses.dataclass(eq=False)
class Unit:
    """One gather of a parameter group. A group that is used again later in the step is gathered again: another unit."""

    index: int
    group: ParameterGroup
    compute_dtype: tf.DType | None  # of the variables that are cast before they travel; None: all as they are stored
    shards: dict[int, tf.Tensor]  # this rank's shard by variable id
    outputs: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)  # the gathered tensor by variable id
    is_kept: bool = False  # the forward copy serves backward too

    @property
    def gathered(self) -> tf.Operation:
        """The operation that yields what was gathered last."""
        return list(self.outputs.values())[-1].op

    def readers(self) -> list[Reader]:
        """Returns who reads the gathered tensors or views of them."""
        return [reader for variable, full in self.outputs.items() for reader in readers_of(full, variable)]

    def forward_operations(self) -> list[tf.Operation]:
        """Returns who reads them in forward."""
        return [reader.operation for reader in self.readers() if not tape.is_backward(reader.operation)]

    def backward_readers(self, idle: Set[str] = frozenset()) -> list[Reader]:
        """Returns who reads them in backward, but for operations of the names `idle`, which do not run."""
        return [reader for reader in self.readers() if tape.is_backward(reader.operation) and reader.operation.name not in idle]


@dataclasses.dataclass(eq=False)
class PendingGradient:
    """A full local gradient that waits to be reduce-scattered; `stub` stands for the result until then."""

    unit: Unit
    variable: Any
    full: tf.Tensor
    stub: tf.Tensor


def copy_of(tensor: tf.Tensor, copies: dict[str, tf.Tensor]) -> tf.Tensor:
    """Returns the counterpart of `tensor`, a view, on the second copy; `copies` maps the names that have one, and grows."""
    if tensor.name not in copies:
        if tensor.op.type in tape.LOOPS:
            copies[tensor.name] = copy_of(tensor.op.inputs[tensor.value_index], copies)
        else:
            view = tape.clone(tensor.op, copy_of(tensor.op.inputs[0], copies))
            copies.update({old.name: new for old, new in zip(tensor.op.outputs, view.outputs, strict=True)})
    return copies[tensor.name]


def travelling_dtype(variable: Any, compute_dtype: tf.DType | None) -> tf.DType:
    """Returns the dtype in which `variable` is gathered for a layer that computes in `compute_dtype`."""
    return compute_dtype if compute_dtype is not None and variable.is_autocast else variable.dtype
