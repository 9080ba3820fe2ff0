"""An optimizer's slots: which of its variables belong to one parameter, and which ranks keep them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

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
    slots = _entries_of(optimizer, parameter)
    values = [slot._value for slot in slots]
    try:
        for slot, stand_in in zip(slots, stand_ins, strict=True):
            slot._value = stand_in
        yield
    finally:
        for slot, value in zip(slots, values, strict=True):
            slot._value = value


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
                _broadcast(slots, ranks, ranks[source], f"broadcast/slots_{source}", program)


def _broadcast(slots: Sequence[tf.Variable], ranks: tuple[int, ...], source: int, label: str, program: RankProgram) -> None:
    """Gives `slots` on all of `ranks` the values that they have on rank `source`."""
    dtype = tf.float64 if any(slot.dtype == tf.float64 for slot in slots) else tf.float32
    packed = packing.side_by_side([tf.cast(slot, dtype) for slot in slots], program.constant)
    sent = group_ops.broadcast(program, packed, packed.shape, ranks, source, label)
    for slot, value in zip(slots, packing.apart(sent, [slot.shape for slot in slots], program.constant), strict=True):
        slot.assign(tf.cast(value, slot.dtype), read_value=False)


def _entries_of(optimizer: Any, parameter: Any) -> list[Any]:
    index = optimizer._get_variable_index(parameter)
    count = len(optimizer._trainable_variables)
    slots = []
    for name, values in sorted(vars(optimizer).items()):
        if name in _OTHER_LISTS or not isinstance(values, list) or len(values) != count:
            continue
        slot = values[index]
        if isinstance(getattr(slot, "value", None), tf.Variable) or isinstance(slot, tf.Variable):
            slots.append(slot)
    return slots
