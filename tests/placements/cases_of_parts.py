"""Cases of operations that give numbers another shape, take some of them, look some up, or put several together."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.placements.cases import NUMBERS, names, of, rows
from tests.placements.worlds import Given, World
from tfdist.placements.kinds import How


def number(world: World, *shape: int) -> Given:
    return world.partial(world.one(*NUMBERS), shape)


@of("Shape ShapeN Size Rank")
def sizes(world: World, name: str):
    given = rows(world, *([] if world.one(0, 1) else [world.width()]), rows=names(world), pieces=world.one(1, 2))
    given = world.one(given, given, world.places(), number(world))
    return {"input": [given, given] if name == "ShapeN" else given}


@of("Reshape")
def reshape(world: World, name: str):
    n, both = world.width(), names(world)
    kind = world.one("merge", "merge", "cut", "back", "numbers", "any")
    if kind == "numbers":
        return {"tensor": number(world, 2, n), "shape": world.one([-1], [n, 2], [1, 2 * n])}
    given = rows(world, n, 2, axis=0, rows=both, pieces=world.one(1, 2))
    if kind == "merge":
        shape = world.one(
            world.constant([-1, 2]), world.constant([-1]), world.lengths(2 * n, rows=both), world.lengths(2, rows=both, times=n)
        )
        return {"tensor": given, "shape": shape}
    if kind == "cut":
        return {
            "tensor": rows(world, 6, axis=0, rows=both),
            "shape": world.one(world.constant([-1, 2, 3]), world.lengths(1, 2, 3, rows=both)),
        }
    if kind == "back":
        merged = rows(world, 2, axis=0, rows=both, pieces=n)
        return {"tensor": merged, "shape": world.one(world.lengths(n, 2, rows=both), world.constant([-1, n, 2]))}
    given = rows(world, n, 2, rows=both)
    own = world.lengths(n, 2, axis=world.one(0, 1, 2), rows=both)
    shape = world.one(
        own, own, world.constant([-1, n, 1, 2]), world.constant([1, -1, n]), world.constant([n, -1]), world.constant([n, 2, -1])
    )
    return {"tensor": given, "shape": shape}


@of("Transpose ConjugateTranspose ExpandDims Squeeze")
def turned(world: World, name: str):
    n = world.width()
    given = world.one(rows(world, n, 2, rows=names(world)), number(world, 2, n, 1))
    if name.endswith("Transpose"):
        return {"x": given, "perm": world.one([0, 1, 2], [1, 0, 2], [2, 0, 1], [2, 1, 0])}
    if name == "ExpandDims":
        return {"input": world.one(given, given, world.places()), "axis": world.one(0, 1, 2, -1, -2)}
    axes = world.one([], [1], [-1], [0], [0, 2])
    return {
        "input": world.one(rows(world, 1, n), rows(world, 1, 1), number(world, 1, n, 1), world.places(columns=1)),
        "axis": axes,
    }


@of("Tile BroadcastTo Fill")
def repeated(world: World, name: str):
    n, both = world.width(), names(world)
    if name == "Fill":
        dims = world.one(world.lengths(n, axis=world.one(0, 1), rows=both), world.constant([2, n]))
        return {"dims": dims, "value": world.one(world.same(()), number(world))}
    if name == "Tile":
        given = world.one(rows(world, n, rows=both), rows(world, n), number(world, 2, n), world.same((1, n)), world.same((n, 1)))
        times = world.one(
            world.constant([1, 2]), world.constant([2, 1]), world.lengths(2, rows=world.one(both, ("a",)), axis=world.one(0, 1))
        )
        return {"input": given, "multiples": world.constant([1, 2]) if given.shape[:1] != () and None in given.shape else times}
    shape = world.one(world.lengths(n, rows=both), world.lengths(2, n, rows=both, axis=1), world.constant([3, 2, n]))
    given = world.one(
        rows(world, n, rows=both, axis=0),
        rows(world, 1, rows=both, axis=0),
        number(world, n),
        world.same((n,)),
        world.same((1, n)),
    )
    return {"input": given, "shape": shape}


@of("Pad PadV2 MirrorPad")
def padded(world: World, name: str):
    given = world.one(rows(world, 3, rows=names(world)), rows(world, 3, axis=0), number(world, 3, 3))
    around = world.one([[0, 0], [1, 1]], [[1, 0], [0, 0]], [[0, 0], [0, 0]])
    more = {"mode": "REFLECT"} if name == "MirrorPad" else {"constant_values": world.one(0.0, 2.0)} if name == "PadV2" else {}
    return {"input": given, "paddings": around, **more}


@of("ReverseV2 Roll ReverseSequence")
def reordered(world: World, name: str):
    given = world.one(rows(world, 3, rows=names(world)), number(world, 3, 2))
    if name == "ReverseV2":
        return {"tensor": given, "axis": world.one([0], [1], [-1], [0, 1])}
    if name == "Roll":
        return {"input": given, "shift": [1], "axis": world.one([0], [1], [-1])}
    lengths = world.one(world.shard(dtype="int32"), world.same((3,), "int32"))
    batch = world.one(0, 1)
    return {"input": rows(world, 3), "seq_lengths": lengths, "seq_dim": 1 - batch, "batch_dim": batch}


@of("Range Where OneHot Unpack")
def made(world: World, name: str):
    n = world.width()
    if name == "Range":
        count = world.partial(How.COUNT, (), "int32", rows=world.one(("a",), (), ("a", "b")))
        return {"start": world.constant(world.one(0, 0, 1)), "limit": count, "delta": world.constant(1)}
    if name == "Where":
        given = world.one(world.shard(dtype="bool", rows=names(world)), rows(world, n, dtype="bool"))
        return {"condition": given}
    if name == "Unpack":
        axis = world.one(0, 1, -1)
        given = world.one(
            world.shard(2, axis=1 - axis if axis >= 0 else 0, rows=names(world)), number(world, 2, 2), world.shard(2)
        )
        return {"value": given, "num": 2, "axis": axis}
    given = rows(world, n, dtype="int32", rows=names(world))
    return {"indices": given, "depth": 3, "on_value": 1.0, "off_value": 0.0, "axis": world.one(-1, 0, 1, 2)}


@of("StridedSlice Slice StridedSliceGrad")
def slices(world: World, name: str):
    n, both = world.width(), names(world)
    kind = world.one("inner", "rows", "lengths", "numbers", "places", "rows of one")
    masks: dict[str, int] = {}
    if name == "StridedSliceGrad":
        back = rows(world, 2, axis=0, rows=both)
        return {"shape": world.lengths(3, rows=both), "begin": [0, 1], "end": [0, 3], "strides": [1, 1], "dy": back,
                "begin_mask": 1, "end_mask": 1}  # fmt: skip
    if name == "Slice":
        given = world.one(rows(world, 3, axis=world.one(0, 1), rows=both), number(world, 2, 3))
        count = world.lengths(3, rows=("a",), axis=world.one(0, 1))
        size = world.one(world.constant([-1, -1]), world.constant([-1, 2]), world.constant([2, -1]), count)
        return {"input": given, "begin": world.one(world.constant([0, 0]), world.constant([0, 1])), "size": size}
    if kind == "inner":
        given, spec = rows(world, 3, 4, rows=both, axis=world.one(0, 1, 2)), ([0, 1, 0], [0, 3, 2], [1, 1, 1])
        masks = {"begin_mask": 1, "end_mask": 1, "shrink_axis_mask": world.one(0, 4, 2), "new_axis_mask": world.one(0, 0, 1, 2)}
        masks["ellipsis_mask"] = world.one(0, 0, 1, 2)
    elif kind == "rows":
        given = rows(world, n, axis=0, rows=both)
        begin, end, step = world.one((0, 2, 1), (1, 9, 1), (0, 0, 2), (0, 0, -1), (0, 0, 1), (-1, 0, 1))
        spec = [begin], [end], [step]
        masks = {"end_mask": world.one(0, 1), "begin_mask": world.one(0, 1), "shrink_axis_mask": world.one(0, 0, 1)}
    elif kind == "rows of one":
        given = rows(world, n, axis=0, rows=world.one(("a", "b"), ("a", "c"), ("a", "b", "c"), ("a",)))
        bound, zero = world.lengths(rows=world.one(("a",), ("a", "b"), ("b",))), world.constant([0])
        begin, end = world.one((zero, bound), (bound, zero), (bound, bound))
        masks = {"end_mask": int(end is zero), "begin_mask": world.one(0, 0, int(begin is zero))}
        return {"input": given, "begin": begin, "end": end, "strides": [1], **masks}
    elif kind == "lengths":
        given = world.lengths(2, n, axis=world.one(0, 1, 2), rows=both)
        spec = world.one(([0], [1], [1]), ([1], [3], [1]), ([-1], [0], [1]), ([0], [3], [2]), ([2], [0], [-1]))
        masks = {"shrink_axis_mask": world.one(0, 1), "begin_mask": world.one(0, 0, 1), "end_mask": world.one(0, 1)}
    elif kind == "places":
        given, spec = world.places(columns=2, are_all=world.one(True, False), rows=both), ([0, world.one(0, 1)], [0, 2], [1, 1])
        masks = {"begin_mask": 1, "end_mask": 1, "shrink_axis_mask": 2}
    else:
        given, spec = number(world, 2, 3), ([0], [1], [1])
        masks = {"shrink_axis_mask": world.one(0, 1)}
    begin, end, step = spec
    return {"input": given, "begin": begin, "end": end, "strides": step, **masks}


@of("Split SplitV")
def split(world: World, name: str):
    axis = world.one(0, 1, -1)
    given = world.one(rows(world, 2, rows=world.one(("a", "b"), ("a", "a"), ("a",))), rows(world, 2), number(world, 2, 2))
    if name == "Split":
        return {"axis": axis, "value": given, "num_split": 2}
    by_name = world.one(("a", "b"), ("b", "a"), ("a", "a"))
    counts = [[world.count(rank, [name]) for name in by_name] for rank in range(len(world.rows))]
    wanted = world.partial(How.COUNT, (2,), "int32")
    wanted = Given(
        type(wanted.placement)(How.COUNT, by_name), [np.asarray(c, "int32") for c in counts], np.sum(counts, 0, "int32"), (2,)
    )
    return {"value": given, "size_splits": world.one(world.constant([1, 1]), wanted), "axis": axis, "num_split": 2}


@of("Pack ConcatV2")
def joined(world: World, name: str):
    n, both = world.width(), names(world)
    kind = world.one("rows", "rows", "numbers", "number and same", "lengths", "places", "with same")
    given: list[Any]
    if kind == "rows":
        axis = world.one(0, 1)
        given = [rows(world, n, axis=axis, rows=both), rows(world, n, axis=axis, rows=world.one(both, ("a",), ("b",)))]
    elif kind == "with same":
        given = [rows(world, n, axis=0), world.one(world.same((n, n)), world.constant(np.ones((n, n)), "float32"))]
    elif kind == "places":
        columns = () if name == "Pack" else (1,)
        given = [world.places(rows=both, columns=len(columns)), world.shard(*columns, dtype="int32", rows=both)]
    elif kind == "lengths":
        count = world.partial(How.COUNT, () if name == "Pack" else (1,), "int32", rows=world.one(("a",), ("b",), ()))
        other = world.constant([2][0] if name == "Pack" else [2, 3])
        same = world.partial(How.COUNT, count.shape, "int32", rows=("a",))
        given = world.one([count, other], [other, count], [count, same], [count])
    else:
        how = world.one(*NUMBERS)
        other = world.one(world.same((n,)), world.constant(np.zeros(n), "float32"))
        given = [world.partial(how, (n,)), other if kind == "number and same" else world.partial(world.one(how, *NUMBERS), (n,))]
    return {"values": given, "axis": world.one(0, 1, -1) if kind != "lengths" else 0}


@of("DynamicStitch ParallelDynamicStitch ConcatOffset BroadcastArgs")
def shapes(world: World, name: str):
    own = world.lengths(2, 3, axis=world.one(0, 1))
    if name == "ConcatOffset":
        return {"concat_dim": world.one(0, 1, 2), "shape": [own, own]}
    if name.startswith("Broadcast"):
        return {"s0": own, "s1": world.one(world.constant([3]), world.constant([1, 3]), own, world.constant([1, 2, 3]))}
    return {"indices": [world.constant([0, 1, 2]), world.constant(world.one([0], [1], [1, 2]))], "data": [own, world.one(
        world.constant([1]), world.constant([1, 1]))]}  # fmt: skip


@of("GatherV2 Gather GatherNd")
def gathers(world: World, name: str):
    n, both = world.one(4, 4, max(world.rows)), names(world)
    kind = world.one("table", "places", "inner", "batch", "numbers", "lengths")
    if name == "GatherNd":
        choices = {
            "table": (world.same((4, 3)), rows(world, 2, dtype="int32", axis=0, rows=both)),
            "places": (
                rows(world, 4, axis=0, rows=both),
                world.places(columns=world.one(1, 2), are_all=world.one(True, False), rows=both),
            ),
            "inner": (rows(world, 4, n, rows=both), world.same((2, 1), "int32")),
            "numbers": (number(world, 3, 3), world.one(world.same((2, 2), "int32"), world.shard(2, dtype="int32"))),
        }
        table, wanted = choices.get(kind, choices["table"])
        return {"params": table, "indices": wanted}
    axis = world.one(0, 1, -1)
    more: dict[str, Any] = {"axis": axis} if name == "GatherV2" else {}
    if kind == "table":
        given = (
            world.same((n, 4)),
            rows(world, *world.one((), (2,)), dtype="int32", rows=both) if world.one(0, 1) else world.shard(dtype="int32"),
        )
    elif kind == "places":
        at = axis % 2 if more else 0
        given = (
            world.shard(4, axis=at, rows=both),
            world.places(are_all=world.one(True, False), rows=both, columns=world.one(0, 1)),
        )
    elif kind == "inner":
        given = rows(world, 4, rows=both), world.same(world.one((2,), (), (2, 2)), "int32")
    elif kind == "batch" and more:
        given = world.shard(4, rows=both), world.one(world.shard(2, dtype="int32", rows=both), world.same((2, 2), "int32"))
        more = {"axis": 1, "batch_dims": 1}
    elif kind == "lengths":
        given = world.lengths(2, 3, axis=world.one(0, 1, 2), rows=both), world.constant(world.one([0, 1], [1, 2], 0, 1, [2, 0]))
        more = {"axis": 0} if more else {}
    else:
        given = number(world, 4, 4), world.one(world.same((2,), "int32"), world.shard(dtype="int32"))
    return {"params": given[0], "indices": given[1], **more}


@of("DynamicPartition SparseTensorDenseMatMul SparseToDense")
def chosen(world: World, name: str):
    both, n = names(world), world.width()
    if name == "DynamicPartition":
        return {
            "data": rows(world, n, axis=world.one(0, 0, 1), rows=both),
            "partitions": world.shard(dtype="int32", rows=both),
            "num_partitions": 3,
        }
    where = world.places(columns=2, are_all=True, rows=both)
    where = Given(where.placement, [p.astype("int64") for p in where.parts], where.whole.astype("int64"), where.shape)
    shape = world.lengths(3, rows=both)
    shape = Given(
        shape.placement, [p.astype("int64") for p in shape.parts], shape.whole.astype("int64"), shape.shape, shape.is_constant
    )
    if name == "SparseToDense":
        return {"sparse_indices": where, "output_shape": shape, "sparse_values": world.shard(rows=both), "default_value": 0.0}
    return {"a_indices": where, "a_values": world.shard(rows=both), "a_shape": shape, "b": world.same((3, 2))}


@of(
    "SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd "
    "UnsortedSegmentSum"
)
def segments(world: World, name: str):
    both = names(world)
    constant = world.same(np.asarray([0, 0, 1], "int32"))
    given, numbers = world.one(
        (rows(world, 3, axis=0, rows=both), world.shard(dtype="int32", rows=both)),
        (rows(world, 3, axis=1, rows=both), constant),
        (number(world, 3, 2), constant),
    )
    more = {"num_segments": 3} if name.startswith("Unsorted") else {}
    return {"data": given, "segment_ids": numbers, **more}


@of("ScatterNd TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate")
def scattered(world: World, name: str):
    both = names(world)
    kind = world.one("table", "places", "numbers")
    if kind == "places":
        numbers = world.places(columns=2, rows=both)
        given, into, shape = world.shard(rows=both), world.shard(3, rows=both), world.lengths(3, rows=both)
    elif kind == "numbers":
        numbers, given = world.same(np.asarray([[0], [2]], "int32")), number(world, 2, 3)
        into, shape = world.same((4, 3)), world.constant([4, 3])
    else:
        numbers, given = world.shard(1, dtype="int32", rows=both), world.shard(3, rows=both)
        into, shape = world.one(world.same((4, 3)), world.constant(np.zeros((4, 3)), "float32")), world.constant([4, 3])
    if name == "ScatterNd":
        return {"indices": numbers, "updates": given, "shape": shape}
    return {"tensor": into, "indices": numbers, "updates": given}
