"""The step of variables whose slots live whole on one rank (`ownership`).

In buckets: the shards of the gradients (and, at stage 3, of the weights) are gathered, each owner steps on its variables, and
sends the new weights to the others. Of a variable that is sharded over the tensor axis, every tensor rank of the owner's takes
the same step on the whole.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram
from tfdist.graphs import tape
from tfdist.optimizers.slots import broadcast_together, slots_of
from tfdist.optimizers.target import Target, local_part
from tfdist.optimizers.update import stand_in_of, update
from tfdist.sharding.shard_messages import gather_over_tensor, gather_shards


def complete(
    grads: Sequence[tf.Tensor], targets: Sequence[Target], bucket: int, program: RankProgram
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the whole gradients and the whole parameters of `targets`; what is sharded over the data axis in one message."""
    tensors = [*grads, *(target.stored.read_value() for target in targets)]
    layouts = [*(target.state_layout for target in targets), *(target.layout for target in targets)]
    label = f"all_gather/owned_{bucket}"
    places = [place for place, layout in enumerate(layouts) if layout.is_data_sharded]
    if places:
        gathered = gather_shards(program, [tensors[place] for place in places], [layouts[place] for place in places], label)
        for place, whole in zip(places, gathered, strict=True):
            tensors[place] = whole
    wholes = [
        gather_over_tensor(program, tensor, layout, f"{label}/tensor") for tensor, layout in zip(tensors, layouts, strict=True)
    ]
    return wholes[: len(grads)], wholes[len(grads) :]


def update_owned(optimizer: Any, target: Target, weight: tf.Tensor, grad: tf.Tensor, learning_rate: tf.Tensor) -> tf.Tensor:
    """Returns the whole `weight` after the optimizer's update, on its owner; the slots are updated in place."""
    began = tape.operations_so_far()
    updated = update(optimizer, stand_in_of(optimizer, target.variable, weight), grad, learning_rate)
    _check_writes(optimizer, target, tape.operations_since(began))
    return updated


def publish(
    optimizer: Any, targets: Sequence[Target], weights: Sequence[tf.Tensor], owner: int, bucket: int, program: RankProgram
) -> None:
    """Sends the owner's new weights, and slots that every rank keeps (a factor's rows), to the others, which store them."""
    kept = [
        local_part(slot, program)
        for target in targets
        for slot in slots_of(optimizer, target.variable)
        if slot.dtype.is_floating and slot.layout.data_owner is None
    ]
    ranks, tensors = program.group_ranks("shard"), [*weights, *(slot.read_value() for slot in kept)]
    values = broadcast_together(tensors, ranks, ranks[owner], f"broadcast/owned_{bucket}", program)
    for target, weight in zip(targets, values, strict=False):
        target.store_global(weight)
    for slot, value in zip(kept, values[len(targets) :], strict=True):
        slot.assign(value, read_value=False)


def _check_writes(optimizer: Any, target: Target, operations: Sequence[tf.Operation]) -> None:
    """Raises when the owner alone has written something that the other ranks keep too."""
    graph = tf.compat.v1.get_default_graph()
    own = {id(_external(graph, local_part(slot, target.program).handle)) for slot in slots_of(optimizer, target.variable)}
    for operation in operations:
        if tape.writes(operation) and id(_external(graph, operation.inputs[0])) not in own:
            name = type(optimizer).__name__
            raise errors.not_implemented(
                f"`{name}.update_step` writes a variable that is not a slot of the parameter it is given. With "
                "sharded optimizer state one rank alone steps each parameter, and the others would not see it.",
                optimizer=name,
                fix="Keep one slot per parameter, in lists as long as the list of parameters; write what is common to "
                "all in `_backend_update_step`; or use `zero_stage=0`.",
            )


def _external(graph: tf.Graph, tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor outside of `graph`, a function's, that `tensor`, one of its captures, stands for."""
    while hasattr(graph, "captures"):
        outside = {id(inner): outer for outer, inner in graph.captures}
        if id(tensor) not in outside:
            break
        tensor, graph = outside[id(tensor)], graph.outer_graph
    return tensor
