"""Gathered parameters of one rank's step, and who reads them: what is gathered a second time for backward follows from that.

Note: views. A layer often reshapes, transposes or casts a weight before it multiplies with it; what backward holds is then the
view, which shares the weight's buffer or is as large. Operations that only move or cast a weight are made again on the second
copy. A loop hands a weight that it captured on to its gradient as one of its outputs: that is a view too. So is what a layer
joins of weights that are gathered together, as Keras does for cuDNN's LSTM and GRU.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.graphs import tape
from tfdist.placements.table import moved_inputs
from tfdist.sharding import keras_scope
from tfdist.sharding.config import MeshConfig
from tfdist.sharding.parameter_group import ParameterGroup
from tfdist.sharding.shard_messages import gather_parameters, messages_of, scope_name


@dataclasses.dataclass(frozen=True)
class Reader:
    """An operation that reads `tensor`: the gathered variable of id `variable`, or a view of it."""

    operation: tf.Operation
    tensor: tf.Tensor
    variable: int


def readers_of(tensor: tf.Tensor, variable: int, gathered: Collection[str], joined: set[str] | None = None) -> Iterator[Reader]:
    """Yields who reads `tensor`, the gathered variable of id `variable`, or a view of it.

    Args:
        gathered: the names of the tensors that are gathered together, of which what is joined is a view.
        joined: the names of those operations that join several inputs, and have been seen.
    """
    joined = set() if joined is None else joined
    for operation in tensor.consumers():
        if tape.is_backward(operation):
            yield Reader(operation, tensor, variable)
        elif _is_view(operation, tensor, gathered):
            if operation.name not in joined:
                joined.update([operation.name] if len(_moved_by(operation)) > 1 else [])
                for view in operation.outputs:
                    yield from readers_of(view, variable, gathered, joined)
        else:
            yield Reader(operation, tensor, variable)
            for passed in tape.loop_invariants(operation, tensor):
                yield from readers_of(passed, variable, gathered, joined)


def sources_of(tensor: tf.Tensor, gathered: Collection[str]) -> list[tf.Tensor]:
    """Returns what `tensor` is a view of: tensors with the names `gathered`, and others that are no views."""
    moved = [] if tensor.name in gathered else _moved_by(tensor.op)
    return [source for place in moved for source in sources_of(tensor.op.inputs[place], gathered)] or [tensor]


def is_view(tensor: tf.Tensor, gathered: Collection[str]) -> bool:
    """Whether `tensor` is made of tensors with the names `gathered`, and of constants, by moving, casting and joining."""
    if tensor.name in gathered:
        return False
    found = [source.name in gathered or source.op.type for source in sources_of(tensor, gathered)]
    return True in found and all(one in (True, "Const") for one in found)


def _is_view(operation: tf.Operation, tensor: tf.Tensor, gathered: Collection[str]) -> bool:
    """Whether `operation`, which reads the view `tensor`, makes another of it."""
    moved = _moved_by(operation)
    if len(moved) > 1:
        return is_view(operation.outputs[0], gathered)
    return any(tape.same(operation.inputs[place], tensor) for place in moved)


def _moved_by(operation: tf.Operation) -> range:
    return moved_inputs(operation.type, len(operation.inputs))


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
        gathered = {full.name for full in self.outputs.values()}
        return [reader for variable, full in self.outputs.items() for reader in readers_of(full, variable, gathered)]

    def operations(self) -> list[tf.Operation]:
        """Returns the operations that read them."""
        return [reader.operation for reader in self.readers()]

    def backward_readers(self, idle: Set[str] = frozenset()) -> list[Reader]:
        """Returns who reads them in backward, but for operations of the names `idle`, which do not run."""
        return [reader for reader in self.readers() if tape.is_backward(reader.operation) and reader.operation.name not in idle]


def copy_of(tensor: tf.Tensor, copies: dict[str, tf.Tensor]) -> tf.Tensor:
    """Returns the counterpart of `tensor`, a view, on the second copy; `copies` maps the names that have one, and grows."""
    if tensor.name not in copies:
        if tensor.op.type in tape.LOOPS:
            copies[tensor.name] = copy_of(tensor.op.inputs[tensor.value_index], copies)
        elif moved := _moved_by(tensor.op):
            inputs = [copy_of(one, copies) if place in moved else one for place, one in enumerate(tensor.op.inputs)]
            view = tape.with_inputs(tensor.op, inputs)
            copies.update({old.name: new for old, new in zip(tensor.op.outputs, view.outputs, strict=True)})
        else:
            return tensor  # a constant that is joined with what was gathered
    return copies[tensor.name]


def travelling_dtype(variable: Any, compute_dtype: tf.DType | None) -> tf.DType:
    """Returns the dtype in which `variable` is gathered for a layer that computes in `compute_dtype`."""
    return compute_dtype if compute_dtype is not None and variable.is_autocast else variable.dtype


def compute_dtype_of(variable: Any, dtype: tf.DType) -> tf.DType | None:
    """Returns the dtype in which the layer computes that reads `variable` as `dtype`; None: it reads what is stored."""
    compute_dtype = keras_scope.autocast_dtype()
    return compute_dtype if travelling_dtype(variable, compute_dtype) == dtype else None


def gather_group(
    program: RankProgram,
    variables: Sequence[Any],
    shards: Mapping[int, tf.Tensor],
    compute_dtype: tf.DType | None,
    label: str,
    config: MeshConfig,
) -> Iterator[tuple[Any, tf.Tensor]]:
    """Yields `variables`, each with its full value for a layer that computes in `compute_dtype`, gathered from the ranks'
    `shards`, this one's by the variable's id, in as few messages as `messages_of` says."""
    for members in messages_of(variables, variables, lambda v: travelling_dtype(v, compute_dtype)):
        with tf.name_scope(scope_name(label)):
            given, dtype = [shards[id(v)] for v in members], travelling_dtype(members[0], compute_dtype)
            fulls = gather_parameters(program, given, members, label, config, dtype)
        yield from zip(members, fulls, strict=True)
