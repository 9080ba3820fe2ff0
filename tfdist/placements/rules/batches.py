"""Operations that take one row after the other: images, classes of each row, matrices, strings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Unknown, Why
from tfdist.placements.rules.meeting import aligned, merged, other_than_rows


def batch(call: Call, rows: Sequence[int] = (0,)) -> Placement:
    """Of one whose inputs number `rows`, and whose results, have rows along axis 0."""
    return together(call, rows) or _why(call)


def together(call: Call, rows: Sequence[int]) -> Shard | None:
    """Returns the rows that inputs number `rows` are along axis 0, all others being settings or shapes; None: they are not so."""
    are_rows = all(isinstance(x := call.inputs[place], Shard) and x.axis == 0 for place in rows)
    others = [x for place, x in enumerate(call.inputs) if place not in rows]
    is_set = all(isinstance(x, Replicate) or (isinstance(x, Lengths) and x.axis == 0) for x in others)
    found = merged(call, rows, 0) if are_rows and is_set else None
    return found if isinstance(found, Shard) else None


def matrices(call: Call, inner: int, inputs: int = 1) -> Placement:
    """Of one that takes the last `inner` axes of each of `inputs` together, and all axes before these one by one."""
    found, ranks = list(call.inputs[:inputs]), [shape.rank for shape in call.shapes[:inputs]]
    axes = {x.axis for x in found if isinstance(x, Shard)}
    are_rows = all(isinstance(x, Shard) for x in found) and all(isinstance(x, Replicate) for x in call.inputs[inputs:])
    if not are_rows or len(axes) != 1 or len(set(ranks)) != 1 or None in ranks:
        return _why(call)
    (axis,) = axes
    return merged(call, range(inputs), axis) if axis < ranks[0] - inner else call.unknown(Why.MEET)


def set_diagonal(call: Call) -> Placement:
    """Of MatrixSetDiagV3: matrices, and a diagonal of each."""
    found, rank = call.inputs[:2], call.shapes[0].rank
    axes = {x.axis if isinstance(x, Shard) else -1 for x in found}
    is_outer = len(axes) == 1 and rank is not None and 0 <= min(axes) < rank - 2
    return merged(call, [0, 1], min(axes)) if is_outer and all(isinstance(x, Replicate) for x in call.inputs[2:]) else _why(call)


def along_last(call: Call) -> Placement:
    """Of one that takes the last axis of its inputs together, of which all are met element by element."""
    found, rank = aligned(call), max((shape.rank or 0 for shape in call.shapes), default=0)
    return call.unknown(Why.MEET) if isinstance(found, Shard) and found.axis == rank - 1 else found


def normalized(call: Call) -> list[Placement]:
    """Of FusedBatchNormV3. A layer's own normalization is by the rows of a device, as Keras has it."""
    found = together(call, [0])
    if found is None:
        return [_why(call)] * len(call.results)
    is_training = call.attribute("is_training")
    return [found, *[call.unknown(Why.FUNCTION) if is_training else Replicate()] * (len(call.results) - 1)]


def normalized_gradient(call: Call) -> list[Placement]:
    are_rows = all(isinstance(x, Shard) and x.axis == 0 for x in call.inputs[:2]) and isinstance(call.inputs[2], Replicate)
    found = merged(call, [0, 1], 0) if are_rows else _why(call)
    if isinstance(found, Unknown):
        return [found] * len(call.results)
    return [found, Partial(How.SUM), Partial(How.SUM), *[Replicate()] * (len(call.results) - 3)]


def to_blocks(call: Call) -> Placement:
    """Of SpaceToBatchND: all rows once for each place in a block, one behind the other."""
    given, shape = together(call, [0]), call.value(1)
    if given is None or shape is None or not (given.rows and given.is_even):
        return _why(call)
    return dataclasses.replace(given, rows=given.rows * int(np.prod(shape)))


def from_blocks(call: Call) -> Placement:
    given, shape = together(call, [0]), call.value(1)
    if given is None or shape is None:
        return _why(call)
    times = int(np.prod(shape))
    rows = given.rows[: len(given.rows) // times]
    return dataclasses.replace(given, rows=rows) if rows and rows * times == given.rows else _why(call)


def transformed(call: Call) -> Placement:
    """Of ImageProjectiveTransformV3: images, and a transform of each or one of all."""
    if isinstance(call.inputs[1], Shard):
        return together(call, [0, 1]) or _why(call)
    is_one = call.shapes[1].rank == 2 and call.shapes[1][0] == 1
    return (together(call, [0]) if is_one else None) or _why(call)


def cropped(call: Call) -> Placement:
    """Of CropAndResize: images, boxes, and of which image each is."""
    images, boxes, numbers = call.inputs[:3]
    if not isinstance(numbers, Places) or not (numbers.are_all and numbers.pieces == 1 and numbers.rows):
        return call.unknown(Why.MEET)
    are_rows = images == boxes == Shard(0, numbers.rows)
    return images if are_rows and isinstance(call.inputs[3], Replicate) else call.unknown(Why.MEET)


def found_places(call: Call) -> Placement:
    """Of the places of values among sorted ones, for each row."""
    return together(call, [0, 1]) or _why(call)


def words(call: Call) -> list[Placement]:
    """Of StringSplitV2: places, words, and a shape with the number of those of the longest row."""
    found = call.inputs[0]
    if not isinstance(found, Shard) or found.axis or not isinstance(call.inputs[1], Replicate):
        return [_why(call)] * 3
    return [Places(False, found.rows, found.pieces), Shard(0, found.rows, False, None), call.unknown(Why.SIZE)]


def padded(call: Call) -> Placement:
    """Of RaggedTensorToTensor, which makes all rows as long as the longest, if their length is not given."""
    sizes, values = call.elements(0), call.inputs[1]
    is_of_rows = isinstance(values, Shard) and not values.axis and isinstance(call.inputs[2], Replicate)
    if is_of_rows and sizes and None not in sizes[1:] and min(sizes[1:], default=-1) >= 0 and sizes[0] == -1:
        return Shard()
    return call.unknown(Why.SIZE)


def looked_up(call: Call) -> Placement:
    """Of LookupTableFindV2: the table, keys and what is found for others."""
    keys = call.inputs[1]
    return keys if isinstance(keys, Shard) and isinstance(call.inputs[2], Replicate) else _why(call)


def meeting(call: Call) -> Unknown:
    """Of one in which all that it is given meets."""
    return _why(call)


def function_of_all(call: Call) -> Unknown:
    return other if (other := other_than_rows(call, range(len(call.inputs)))) is not None else call.unknown(Why.FUNCTION)


def _why(call: Call) -> Unknown:
    return other_than_rows(call, range(len(call.inputs))) or call.unknown(Why.MEET)
