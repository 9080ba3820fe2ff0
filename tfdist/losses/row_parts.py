"""Which part of the rows of a batch a slice takes: `x[1:]`, `x[::2]`, `x[0]`, `tf.split(x, 2)[1]`; None: it is no slice."""

from __future__ import annotations

import tensorflow as tf

from tfdist.graphs.constants import value_of


def part_of_rows(tensor: tf.Tensor) -> str | None:
    """Returns what `tensor`, a slice of rows, takes of them, in words that are the same for the same part; None: all.

    In a slice to where another batch ends, `x[: tf.shape(y)[0]]`, all are taken.
    """
    op = tensor.op
    if op.type in ("Split", "SplitV"):
        axis = value_of(op.inputs[0] if op.type == "Split" else op.inputs[2])
        is_first = axis is not None and int(axis) in (0, -op.outputs[0].shape.rank if op.outputs[0].shape.rank else 0)
        return f"part {tensor.value_index} of {len(op.outputs)}" if is_first and len(op.outputs) > 1 else None
    if op.type != "StridedSlice" or (op.get_attr("new_axis_mask") | op.get_attr("ellipsis_mask")) & 1:
        return None
    begins, ends = not op.get_attr("begin_mask") & 1, not op.get_attr("end_mask") & 1
    first, last, step = (_first_of(x) for x in op.inputs[1:4])
    if op.get_attr("shrink_axis_mask") & 1:
        return f"row {first}"
    begins, ends = begins and first != "0", ends and last != str(op.inputs[0].shape[0])
    if step == "-1" or not (begins or ends or step != "1") or last == "rows" and not begins and step == "1":
        return None
    return f"rows {first if begins else ''}:{last if ends else ''}:{step}"


def _first_of(numbers: tf.Tensor) -> str:
    """Returns the first of `numbers` in words."""
    known = value_of(numbers)
    if known is not None:
        return str(int(known.reshape(-1)[0]))
    first = numbers.op.inputs[0] if numbers.op.type == "Pack" else numbers
    known = value_of(first)
    if known is not None:
        return str(int(known))
    is_size = first.op.type == "StridedSlice" and first.op.inputs[0].op.type == "Shape"
    return "rows" if is_size else first.name
