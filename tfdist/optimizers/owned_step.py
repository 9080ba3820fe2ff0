"""The step of variables whose slots live whole on one rank (`ownership`).

In buckets: the shards of the gradients (and, at stage 3, of the weights) are gathered, each owner steps on its variables, and
sends the new weights to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram, wire
from tfdist.optimizers.ownership import owner_of
from tfdist.optimizers.parameter_shard import ParameterShard, parameter_shard, update_shard
from tfdist.optimizers.reduction import ReducedGradient, buckets_of
from tfdist.optimizers.slots import slots_of
from tfdist.optimizers.variables import is_data_sharded, layout_of, local_part
from tfdist.sharding import Layout, MeshConfig, ShardedVariable, packing, tensor_cut

_WRITES = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})


def step_on_owners(
    optimizer: Any,
    reduced: Sequence[ReducedGradient],
    learning_rate: tf.Tensor,
    config: MeshConfig,
    program: RankProgram,
) -> None:
    """Updates the variables of `reduced` each on its owner, and publishes them.

    Of a variable that is cut over the tensor axis, every tensor rank of the owner's takes the same step on the whole.
    """
    whole = [tf.TensorSpec(layout_of(gradient.variable, config).shape, gradient.dtype) for gradient in reduced]
    for number, bucket in enumerate(buckets_of(whole, config.bucket_bytes)):
        _OwnedBucket(optimizer, [reduced[place] for place in bucket], number, config, program).step(learning_rate)


class _OwnedBucket:
    """Variables that travel together, on one rank."""

    def __init__(self, optimizer: Any, members: Sequence[ReducedGradient], number: int, config: MeshConfig, program: RankProgram):
        self._optimizer = optimizer
        self._members = members
        self._number = number
        self._program = program
        self._ranks = program.group_ranks("data")
        self._coordinate = program.mesh.coordinate(program.rank)
        self._layouts = [config.slot_layout(layout_of(member.variable, config)) for member in members]

    def step(self, learning_rate: tf.Tensor) -> None:
        grads, weights = self._gathered()
        by_owner: dict[int, list[int]] = {}
        for place, member in enumerate(self._members):
            by_owner.setdefault(owner_of(self._optimizer, member.variable), []).append(place)
        for owner, places in sorted(by_owner.items()):
            if self._ranks[owner] == self._program.rank:
                for place in places:
                    weights[place] = self._stepped(place, weights[place], grads[place], learning_rate)
            self._publish(owner, places, weights)

    def _gathered(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the whole gradients and weights."""
        layouts = self._layouts
        tensors = [member.value for member in self._members]
        tensors += [local_part(member.variable, self._program).read_value() for member in self._members]
        is_shard = [layout.is_data_sharded for layout in layouts] + [is_data_sharded(m.variable) for m in self._members]
        locals_ = self._unsharded(tensors, [*layouts, *layouts], is_shard)
        label = f"all_gather/owned_{self._number}/tensor"
        wholes = [
            tensor_cut.gather_cuts(self._program, local, layout, label)
            for local, layout in zip(locals_, [*layouts, *layouts], strict=True)
        ]
        return wholes[: len(layouts)], wholes[len(layouts) :]

    def _unsharded(self, tensors: Sequence[tf.Tensor], layouts: Sequence[Layout], is_shard: Sequence[bool]) -> list[tf.Tensor]:
        """Returns `tensors` with those that are flat shards gathered over the data axis, in one message."""
        places = [place for place, sharded in enumerate(is_shard) if sharded]
        if not places:
            return list(tensors)
        shards, label = [tensors[place] for place in places], f"all_gather/owned_{self._number}"
        gathered = wire.all_gather_parts(self._program, shards, self._ranks, label)
        fulls = iter(packing.fulls_of(gathered, [layouts[place] for place in places], self._program.constant))
        return [next(fulls) if sharded else tensor for tensor, sharded in zip(tensors, is_shard, strict=True)]

    def _stepped(self, place: int, weight: tf.Tensor, grad: tf.Tensor, learning_rate: tf.Tensor) -> tf.Tensor:
        """Returns the weight after the optimizer's update, and its constraint; the slots are updated in place."""
        parameter = parameter_shard(self._optimizer, self._members[place].variable, weight)
        graph = tf.compat.v1.get_default_graph()
        before = 0 if tf.executing_eagerly() else len(graph.get_operations())
        update_shard(self._optimizer, parameter, grad, learning_rate)
        if not tf.executing_eagerly():
            self._check_writes(graph, graph.get_operations()[before:], parameter)
        return parameter.value()

    def _check_writes(self, graph: tf.Graph, operations: Sequence[tf.Operation], parameter: ParameterShard) -> None:
        """Raises when the owner alone has written something that the other ranks keep too."""
        own = {id(_external(graph, local_part(slot, self._program).handle)) for slot in slots_of(self._optimizer, parameter)}
        for operation in operations:
            if operation.type in _WRITES and id(_external(graph, operation.inputs[0])) not in own:
                name = type(self._optimizer).__name__
                raise NotImplementedError(
                    errors.message(
                        f"`{name}.update_step` writes a variable that is not a slot of the parameter it is given. With "
                        "sharded optimizer state one rank alone steps each parameter, and the others would not see it.",
                        optimizer=name,
                        fix="Keep one slot per parameter, in lists as long as the list of parameters; write what is common to "
                        "all in `_backend_update_step`; or use `zero_stage=0`.",
                    )
                )

    def _publish(self, owner: int, places: Sequence[int], weights: list[tf.Tensor]) -> None:
        """Sends the owner's new weights, and slots that every rank keeps (a factor's rows), to the others."""
        program, source = self._program, self._ranks[owner]
        kept = [
            local_part(slot, program)
            for place in places
            for slot in slots_of(self._optimizer, self._members[place].variable)
            if slot.dtype.is_floating and not (isinstance(slot, ShardedVariable) and slot.layout.data_owner is not None)
        ]
        tensors = [weights[place] for place in places]
        tensors += [tf.cast(slot.read_value(), tensors[0].dtype) for slot in kept]
        packed = packing.side_by_side(tensors, program.constant)
        sent = wire.broadcast(program, packed, packed.shape, self._ranks, source, f"broadcast/owned_{self._number}")
        parts = packing.apart(sent, [tensor.shape for tensor in tensors], program.constant)
        for place, whole in zip(places, parts, strict=False):
            variable = self._members[place].variable
            whole = packing.cut_tensor(whole, self._layouts[place], self._coordinate)
            if is_data_sharded(variable):
                whole = packing.cut_shard(whole, variable.layout, self._coordinate.data)
            local_part(variable, program).assign(whole, read_value=False)
        for slot, value in zip(kept, parts[len(places) :], strict=True):
            slot.assign(tf.cast(value, slot.dtype), read_value=False)


def _external(graph: tf.Graph, tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor outside of `graph`, a function's, that `tensor`, one of its captures, stands for."""
    while hasattr(graph, "captures"):
        outside = {id(inner): outer for outer, inner in graph.captures}
        if id(tensor) not in outside:
            break
        tensor, graph = outside[id(tensor)], graph.outer_graph
    return tensor
