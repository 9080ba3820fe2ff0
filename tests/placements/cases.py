"""For each operation of the table: inputs and attributes to prove its rule with, drawn by a `World`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.placements.worlds import Case, Given, World
from tfdist.placements.kinds import How

CASES: dict[str, Callable[[World], Case]] = {}
NUMBERS = (How.SUM, How.MEAN, How.COUNT, How.SHARE, How.MAX, How.MIN, How.ALIKE)


def of(types: str):
    """Registers a function of a world and a type of operation, that makes a case, for `types`."""

    def register(make: Callable[[World, str], dict[str, Any] | Case]):
        for name in types.split():

            def case(world: World, name: str = name) -> Case:
                found = make(world, name)
                return found if isinstance(found, Case) else Case(name, found)

            CASES[name] = case
        return make

    return register


def names(world: World) -> tuple[str, ...]:
    return world.one(("a",), ("a",), ("a", "b"), ("b", "a"))


def rows(world: World, *sizes: int, dtype: str = "float32", axis: int | None = None, **arguments: Any) -> Given:
    """Rows with other axes of `sizes`, or of one to three sizes."""
    sizes = sizes or tuple(world.width() for _ in range(world.one(0, 1, 1, 2)))
    axis = world.one(*range(len(sizes) + 1)) if axis is None else axis
    return world.shard(*sizes, axis=axis, dtype=dtype, **arguments)


def anything(world: World, dtype: str = "float32") -> Given:
    """Rows, or a number of all rows."""
    kind = world.one("shard", "shard", "joined", "uneven", "partial", "replicate")
    if kind == "joined":
        return rows(world, rows=("a", "b"), dtype=dtype)
    if kind == "uneven":
        return world.uneven(world.width(), dtype=dtype)
    if kind == "partial" and dtype.startswith("float"):
        how = world.one(*NUMBERS)
        return world.partial(how, world.one((), (world.width(),)))
    return rows(world, dtype=dtype) if kind != "replicate" else world.same((world.width(),), dtype)


UNARY = {
    "x": """
        Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Digamma Erf Erfc Erfinv Exp Expm1 Floor Inv IsFinite IsInf IsNan Lgamma
        Log Log1p Ndtri OnesLike Reciprocal Rint Round Rsqrt Sigmoid Sign Sin Sinh Sqrt Square Tan Tanh ZerosLike BesselI0e
        BesselI1e BesselI0 BesselI1 BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Dawsn Expint
        FresnelCos FresnelSin Spence
        """,
    "features": "Elu LeakyRelu Relu Relu6 Selu Softplus Softsign",
    "input": "Identity StopGradient PreventGradient Snapshot EnsureShape QuantizeAndDequantizeV2 AsString",
    "tensor": "CheckNumerics",
}


@of(" ".join(UNARY.values()))
def unary(world: World, name: str):
    place = next(place for place, types in UNARY.items() if name in types.split())
    given = anything(world)
    more: dict[str, Any] = {"EnsureShape": {"shape": given.shape}, "CheckNumerics": {"message": ""}}.get(name, {})
    if name == "PreventGradient":
        more = {"message": ""}
    if name == "QuantizeAndDequantizeV2":
        more = {"input_min": 0.0, "input_max": 1.0, "range_given": True}
    return {place: given, **more}


@of("Neg Conj Real Imag Angle ComplexAbs LogicalNot Invert PopulationCount UnicodeScript Cast Bitcast Bucketize")
def other_unary(world: World, name: str):
    if name in ("Conj", "Real", "Imag", "Angle"):
        return {"input": rows(world, dtype="complex64")}
    if name == "LogicalNot":
        return {"x": world.one(rows(world, dtype="bool"), world.partial(world.one(How.MAX, How.MIN), (2,), "bool"))}
    if name in ("Invert", "PopulationCount"):
        return {"x": rows(world, dtype="int32")}
    if name == "UnicodeScript":
        return {"input": rows(world, dtype="int32")}
    if name == "Bucketize":
        return {"input": rows(world), "boundaries": [0.2, 0.5]}
    if name == "Bitcast":
        return {"input": rows(world, dtype="int32"), "type": "float32"}
    if name == "Cast":
        old, new = world.one(("float32", "float64"), ("float32", "int32"), ("float32", "bool"), ("int32", "float32"))
        counts = world.partial(How.COUNT, (), "int32", rows=("a",))
        return {"x": world.one(counts, world.partial(How.SUM, (2,), old)) if old == "int32" else anything(world), "DstT": new}
    return {"x": rows(world, dtype="complex64") if name == "ComplexAbs" else anything(world)}


BINARY = {
    ("x", "y"): """
        Add AddV2 Sub Mul MulNoNan Div DivNoNan RealDiv FloorDiv FloorMod Mod TruncateDiv TruncateMod Maximum Minimum Pow
        SquaredDifference Xdivy Xlogy Xlog1py Equal NotEqual Greater GreaterEqual Less LessEqual LogicalAnd LogicalOr BitwiseAnd
        BitwiseOr BitwiseXor LeftShift RightShift ApproximateEqual
        """,
    ("y", "x"): "Atan2",
    ("x1", "x2"): "NextAfter",
    ("a", "x"): "Igamma Igammac IgammaGradA Polygamma",
    ("x", "q"): "Zeta",
    ("alpha", "sample"): "RandomGammaGrad",
    ("real", "imag"): "Complex",
    ("gradients", "features"): "ReluGrad Relu6Grad LeakyReluGrad SoftplusGrad SoftsignGrad",
    ("gradients", "outputs"): "EluGrad SeluGrad",
    ("y", "dy"): "InvGrad ReciprocalGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad",
    ("gradients", "inputs"): "FakeQuantWithMinMaxArgsGradient",
}
_SAME_SHAPE = " ".join(v for k, v in BINARY.items() if k[0] in ("gradients", "y")).replace("Atan2", "").split()


@of(" ".join(BINARY.values()))
def binary(world: World, name: str):
    one, other = next(places for places, types in BINARY.items() if name in types.split())
    types = {"LogicalAnd": "bool", "LogicalOr": "bool"}
    dtype = "int32" if name.startswith("Bitwise") or name.endswith("Shift") else types.get(name, "float32")
    if name in ("TruncateMod", "TruncateDiv", "Mod"):  # by no zero
        return {one: rows(world, dtype="int32"), other: world.constant(2)}
    if name in _SAME_SHAPE:
        axis, sizes = world.one(0, 1), (world.width(),)
        return {one: rows(world, *sizes, axis=axis), other: rows(world, *sizes, axis=axis)}
    kind = world.one("rows", "rows", "rows and same", "joined", "numbers", "number and same", "number and rows", "uneven")
    if kind == "number and same" or kind == "numbers" and dtype != "float32":
        how = world.one(How.MAX, How.MIN) if dtype == "bool" else world.one(*NUMBERS) if dtype == "float32" else How.COUNT
        number = world.partial(how, world.one((), (2,)), dtype)
        plain = world.one(world.constant(0, dtype), world.constant(2, dtype), world.same((2,), dtype), world.constant(-2, dtype))
        first, second = world.one((number, plain), (plain, number), (number, number))
    elif kind == "numbers":
        hows = world.one((How.SUM, How.COUNT), (How.MEAN, How.COUNT), (world.one(*NUMBERS), world.one(*NUMBERS)))
        first, second = (world.partial(how, world.one((), (2,)), dtype) for how in hows)
    elif kind == "number and rows":
        first, second = world.partial(How.COUNT, (), dtype), rows(world, dtype=dtype)
    elif kind == "uneven":
        first = second = world.uneven(2, dtype=dtype)
    elif kind == "rows and same":
        first = rows(world, dtype=dtype)
        size = world.width()
        second = world.same(
            world.one((), (size,), (1, size), (size, size), (1, 1, size), (1, size, size), (sum(world.rows), 1)), dtype
        )
        first, second = world.one((first, second), (second, first))
    else:
        both = {"rows": ("a", "b")} if kind == "joined" else {}
        sizes = [world.width() for _ in range(world.one(0, 1, 2))]
        axis = world.one(*range(len(sizes) + 1))
        first = world.shard(*sizes, axis=axis, dtype=dtype, **both)
        less = world.one(sizes, sizes[1:], [1] * len(sizes), sizes)
        second = world.shard(*less, axis=world.one(min(axis, len(less)), world.one(*range(len(less) + 1))), dtype=dtype, **both)
    return {one: first, other: second}


@of("AddN")
def sums(world: World, name: str):
    kind, size = world.one("rows", "numbers", "with zero"), world.width()
    if kind == "rows":
        given = [rows(world, size, axis=0) for _ in range(3)]
    else:
        hows = [world.one(How.SUM, How.COUNT, How.SHARE), How.SUM] if kind == "with zero" else [world.one(*NUMBERS)] * 2
        given = [world.partial(how, (size,)) for how in hows]
        given += [world.constant(np.zeros(size), "float32")] * (kind == "with zero")
    return {"inputs": given}


@of("Select SelectV2")
def select(world: World, name: str):
    size, kind = world.width(), world.one("rows", "condition same", "numbers", "number and zero", "vector")
    if kind in ("numbers", "number and zero"):
        how = world.one(*NUMBERS)
        other = world.constant(np.zeros(size), "float32") if kind == "number and zero" else world.partial(how, (size,))
        given = world.same((size,), "bool"), world.partial(how, (size,)), world.one(other, world.same((size,)))
    elif kind == "condition same":
        given = world.same((size,), "bool"), rows(world, size, axis=0), rows(world, size, axis=0)
    elif kind == "vector":
        given = world.shard(dtype="bool"), rows(world, size), rows(world, size)
    else:
        given = rows(world, size, axis=0, dtype="bool"), rows(world, size, axis=0), rows(world, size, axis=0)
    return dict(zip(("condition", "t", "e") if name == "SelectV2" else ("condition", "x", "y"), given, strict=True))


@of("ClipByValue Betainc FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel")
def of_three(world: World, name: str):
    size = world.width()
    if name == "ClipByValue":
        return {"t": rows(world), "clip_value_min": world.same(()), "clip_value_max": world.same(())}
    if name == "Betainc":
        return {place: rows(world, size, axis=0) for place in "abx"}
    given = {"inputs": rows(world, size, axis=0)}
    if name == "FakeQuantWithMinMaxArgs":
        return given
    shape = (size,) if name.endswith("PerChannel") else ()
    return {**given, "min": world.same(-np.ones(shape, "float32")), "max": world.same(shape)}


@of("QuantizeAndDequantizeV3 QuantizeAndDequantizeV4")
def quantized(world: World, name: str):
    low, high = world.same(np.float32(0)), world.same(np.float32(1))
    limits: dict[str, Any] = {"input_min": low, "input_max": high, "range_given": True}
    return {"input": rows(world), **limits, **({"num_bits": world.same(np.int32(8))} if name.endswith("V3") else {})}


STRINGS: dict[str, dict[str, Any]] = {
    "StringLower": {}, "StringUpper": {}, "StringStrip": {}, "StringLength": {}, "EncodeBase64": {},
    "StringToHashBucketFast": {"num_buckets": 3}, "StringToHashBucketStrong": {"num_buckets": 3, "key": [1, 2]},
    "StaticRegexReplace": {"pattern": "a", "rewrite": "b"}, "StaticRegexFullMatch": {"pattern": "a.*"},
    "RegexReplace": {"pattern": "a", "rewrite": "b"}, "RegexFullMatch": {"pattern": "a.*"},
    "StringToHashBucket": {"num_buckets": 3}, "StringToNumber": {}, "DecodeBase64": {}, "Substr": {"pos": 0, "len": 1},
    "UnicodeTranscode": {"input_encoding": "UTF-8", "output_encoding": "UTF-8"},
}  # fmt: skip


@of(" ".join(STRINGS) + " StringJoin StringSplitV2")
def strings(world: World, name: str):
    given = rows(world, world.width(), dtype="string", axis=0)
    if name == "StringJoin":
        return {"inputs": [given, world.one(given, world.same((), "string"))]}
    if name == "StringSplitV2":
        return {"input": world.shard(dtype="string"), "sep": " "}
    place = "string_tensor" if name in ("StringToHashBucket", "StringToNumber") else "input"
    if name in ("StringToNumber", "DecodeBase64"):
        given = world.shard(2, make=lambda shape: np.full(shape, b"MTIz" if name == "DecodeBase64" else b"12", object))
    return {place: given, **STRINGS[name]}
