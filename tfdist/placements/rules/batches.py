"""Operations that take one row after the other: images, classes of each row, matrices, strings."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Why
from tfdist.placements.rules.meeting import aligned, merged, met


def batch(call: Call, rows: Sequence[int] = (0,)) -> Placement:
    """Of one whose inputs number `rows`, and whose results, have rows along axis 0, all others being settings or shapes."""
    others = [x for place, x in enumerate(call.inputs) if place not in rows]
    is_set = all(isinstance(x, Replicate) or (isinstance(x, Lengths) and x.axis == 0) for x in others)
    return merged(call, rows, 0) if is_set and _are_rows(call, *rows) else met(call)


def _are_rows(call: Call, *places: int) -> bool:
    return all(isinstance(x := call.inputs[place], Shard) and x.axis == 0 for place in places)


def matrices(call: Call) -> Placement:
    """Of two inputs of matrices, or of diagonals, taken pair by pair, all axes before the last two one by one."""
    axes = [x.axis for x in call.inputs[:2] if isinstance(x, Shard)]
    ranks = [shape.rank for shape in call.shapes[:2]]
    is_of_pairs = ranks[0] is not None and (ranks[0] == ranks[1] or call.type.startswith("MatrixSetDiag"))
    is_outer = len(axes) == 2 and is_of_pairs and axes[0] == axes[1] < ranks[0] - 2
    return merged(call, [0, 1], axes[0]) if is_outer and call.are_same(*range(2, len(call.inputs))) else met(call)


def along_last(call: Call) -> Placement:
    """Of one that takes the last axis of its inputs together, of which all are met element by element."""
    found = aligned(call)
    call.need(found.axis < max(shape.rank for shape in call.shapes) - 1)
    return found


def normalized(call: Call) -> list[Placement]:
    """Of FusedBatchNormV3. A layer's own normalization is by the rows of a device, as Keras has it."""
    found = batch(call)
    return [found, *[call.unknown(Why.FUNCTION) if call.attribute("is_training") else Replicate()] * (call.number - 1)]


def normalized_gradient(call: Call) -> list[Placement]:
    found = merged(call, [0, 1], 0) if _are_rows(call, 0, 1) and call.are_same(2) else met(call)
    return [found, Partial(How.SUM), Partial(How.SUM), *[Replicate()] * (call.number - 3)]


def to_blocks(call: Call) -> Placement:
    """Of SpaceToBatchND: all rows once for each place in a block, one after the other."""
    given, shape = batch(call), call.value(1)
    if not isinstance(given, Shard) or shape is None or not (given.rows and given.is_even):
        return met(call)
    return dataclasses.replace(given, rows=given.rows * int(np.prod(shape)))


def from_blocks(call: Call) -> Placement:
    given, shape = batch(call), call.value(1)
    if not isinstance(given, Shard) or shape is None:
        return met(call)
    times = int(np.prod(shape))
    rows = given.rows[: len(given.rows) // times]
    return dataclasses.replace(given, rows=rows) if rows and rows * times == given.rows else met(call)


def transformed(call: Call) -> Placement:
    """Of ImageProjectiveTransformV3: images, and a transform of each or one of all."""
    is_one = call.shapes[1].rank == 2 and call.shapes[1][0] == 1
    return batch(call, [0] if is_one and not isinstance(call.inputs[1], Shard) else [0, 1])


def cropped(call: Call) -> Placement:
    """Of CropAndResize: images, boxes, and of which image each is."""
    images, boxes, numbers = call.inputs[:3]
    if not (isinstance(numbers, Places) and numbers.are_all and numbers.pieces == 1 and numbers.rows):
        return call.unknown(Why.MEET)
    call.need(images == boxes == Shard(0, numbers.rows) and call.are_same(3))
    return images


def words(call: Call) -> list[Placement]:
    """Of StringSplitV2: places, words, and a shape with the number of those of the longest row."""
    found = call.inputs[0]
    if not isinstance(found, Shard) or found.axis or not call.are_same(1):
        return [met(call)]
    return [Places(False, found.rows, found.pieces), Shard(0, found.rows, False, None), call.unknown(Why.SIZE)]


def padded(call: Call) -> Placement:
    """Of RaggedTensorToTensor, which makes all rows as long as the longest, if their length is not given."""
    sizes, values = call.elements(0), call.rows(1, Why.SIZE)
    is_sized = bool(sizes) and None not in sizes[1:] and min(sizes[1:], default=-1) >= 0 and sizes[0] == -1
    call.need(is_sized and not values.axis and call.are_same(2), Why.SIZE)
    return Shard()
