"""An optimizer's slots: which of its variables belong to one parameter, and which ranks keep them."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import RankProgram, group_ops
from tfdist.mesh import MESH_AXES
from tfdist.optimizers.target import local_part, variable_of
from tfdist.sharding import packing

# Keras's own lists, which hold no slots of the update.
_OTHER_LISTS = frozenset({"_variables", "_trainable_variables", "_accumulated_gradients", "_model_variables_moving_average"})


def slots_of(optimizer: Any, parameter: Any) -> list[tf.Variable]:
    """Returns the slots of `parameter`: its entry in each of the optimizer's lists that have one entry per parameter."""
    return [variable_of(slot) for slot in _entries_of(optimizer, parameter)]


@contextlib.contextmanager
def slots_replaced(optimizer: Any, parameter: Any, stand_ins: Sequence[Any]) -> Iterator[None]:
    """Within it, Keras's slots of `parameter` read and write `stand_ins`, in the order of `slots_of`."""
    with contextlib.ExitStack() as replaced:
        for slot, stand_in in zip(_entries_of(optimizer, parameter), stand_ins, strict=True):
            replaced.enter_context(temporary.attributes(slot, _value=stand_in))
        yield


def publish_slots(optimizer: Any, program: RankProgram) -> None:
    """Sends slots that every rank keeps, of a parameter that some ranks store only, from the first of these to the others.

    An optimizer makes some slots without saying for which parameter (factors of Adafactor, by `add_variable`). They are on every
    rank, and only the ranks that store the parameter update them. The others get the new values, so that what is read and saved
    is right, whichever rank is asked. One message for each rank that sends.
    """
    for mesh_axis in MESH_AXES:
        by_source: dict[int, list[tf.Variable]] = {}
        for variable in optimizer._trainable_variables:
            holders = variable_of(variable).layout.holders(mesh_axis)
            if holders is not None:
                kept = [slot for slot in slots_of(optimizer, variable) if slot.dtype.is_floating and not slot.layout.is_sharded]
                by_source.setdefault(holders[0], []).extend(local_part(slot, program) for slot in kept)
        ranks = program.group_ranks(mesh_axis)
        for source, slots in sorted(by_source.items()):
            if slots:
                values = broadcast_together(slots, ranks, ranks[source], f"broadcast/slots_{source}", program)
                for slot, value in zip(slots, values, strict=True):
                    slot.assign(value, read_value=False)


def broadcast_together(
    tensors: Sequence[tf.Tensor | tf.Variable], ranks: tuple[int, ...], source: int, label: str, program: RankProgram
) -> list[tf.Tensor]:
    """Returns the values that `tensors` have on rank `source`, on all of `ranks`. One message."""
    dtypes = {tensor.dtype for tensor in tensors}
    dtype = dtypes.pop() if len(dtypes) == 1 else tf.float64 if tf.float64 in dtypes else tf.float32
    packed = packing.side_by_side([tf.cast(tensor, dtype) for tensor in tensors], program.constant)
    sent = group_ops.broadcast(program, packed, packed.shape, ranks, source, label)
    values = packing.split(sent, [tensor.shape for tensor in tensors], program.constant)
    return [tf.cast(value, tensor.dtype) for value, tensor in zip(values, tensors, strict=True)]


def _entries_of(optimizer: Any, parameter: Any) -> list[Any]:
    index = optimizer._get_variable_index(parameter)
    count = len(optimizer._trainable_variables)
    named = [values for name, values in sorted(vars(optimizer).items()) if name not in _OTHER_LISTS]
    entries = [values[index] for values in named if isinstance(values, list) and len(values) == count]
    return [slot for slot in entries if any(isinstance(one, tf.Variable) for one in (slot, getattr(slot, "value", None)))]
