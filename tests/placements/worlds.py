"""A tensor of one device and what each of several ranks has of it, as its placement says; and the reverse, to be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Unknown
from tfdist.placements.table import placements_of
from tfdist.placements.traced_call import TracedCall

# Rows of each rank. One without rows, ranks of as many, of one.
RANKS = ((3, 2), (2, 2), (1, 3), (0, 4), (2, 0, 3), (1, 2, 3), (1, 1), (4, 2))
MORE = {"a": 1, "b": 2, "c": 1}  # how many rows of each tensor of the batch there are for each of the first


@dataclasses.dataclass(frozen=True)
class Given:
    """An input: what each rank has, what one device has, and what is known of it when it is traced."""

    placement: Placement
    parts: list[np.ndarray]
    whole: np.ndarray
    shape: tuple[int | None, ...] = ()
    is_constant: bool = False


class World:
    """Ranks with so many rows each, and choices that hypothesis makes."""

    def __init__(self, data: Any, *, is_static: bool | None = None):
        self._data = data
        self.rows = self.one(*RANKS)
        self.is_static = self.one(False, False, True) if is_static is None else is_static
        self._random = np.random.default_rng(self.one(*range(5)))

    def one(self, *options: Any) -> Any:
        return self._data.draw(st.sampled_from(options))

    def width(self) -> int:
        """Returns a size that is that of a rank's rows, or of all rows, or another."""
        return self.one(max(self.rows[0], 1), sum(self.rows), 1, 2, 3, 5)

    def numbers(self, shape: Sequence[int], dtype: str = "float32") -> np.ndarray:
        if dtype == "bool":
            return self._random.integers(0, 2, shape).astype(bool)
        if dtype.startswith("int"):
            return self._random.integers(0, 3, shape).astype(dtype)
        if dtype == "string":
            return self._random.choice(np.array([b"a b", b"c", b"12 3 4"], object), shape)
        if dtype.startswith("complex"):
            return (self.numbers(shape) + 1j * self.numbers(shape)).astype(dtype)
        return self._random.uniform(0.1, 0.9, shape).astype(dtype)

    def count(self, rank: int, names: Sequence[str]) -> int:
        return sum(self.rows[rank] * MORE[name] for name in names) if names else self.rows[rank]

    # Inputs.

    def same(self, shape: Sequence[int] | np.ndarray, dtype: str = "float32", *, is_constant: bool = False) -> Given:
        value = np.asarray(shape if isinstance(shape, np.ndarray | np.generic) else self.numbers(shape, dtype))
        return Given(Replicate(), [value] * len(self.rows), value, value.shape, is_constant)

    def constant(self, value: Any, dtype: str = "int32") -> Given:
        return self.same(np.asarray(value, dtype), is_constant=True)

    def shard(
        self, *sizes: int, axis: int = 0, rows: tuple[str, ...] = ("a",), pieces: int = 1, dtype="float32", make=None
    ) -> Given:
        """Rows along `axis` among axes of `sizes`."""
        make = make or (lambda shape: self.numbers(shape, dtype))

        def part(count: int) -> np.ndarray:
            return make((*sizes[:axis], count, *sizes[axis:]))

        by_name = [[part(self.count(rank, [name]) * pieces) for rank in range(len(self.rows))] for name in rows or ("a",)]
        parts = [np.concatenate(each, axis) for each in zip(*by_name, strict=True)]
        whole = np.concatenate([np.concatenate(each, axis) for each in by_name], axis)
        return Given(Shard(axis, rows, True, pieces), parts, whole, (*sizes[:axis], None, *sizes[axis:]))

    def uneven(self, *sizes: int, dtype: str = "float32") -> Given:
        parts = [self.numbers((self.one(0, 1, 2, 3) if count else 0, *sizes), dtype) for count in self.rows]
        return Given(Shard(0, ("a",), False, None), parts, np.concatenate(parts), (None, *sizes))

    def partial(self, how: How, shape: Sequence[int] = (), dtype: str = "float32", rows: tuple[str, ...] = ()) -> Given:
        ones, weights = np.ones(shape, dtype), [count / sum(self.rows) for count in self.rows]
        if how is How.COUNT:
            times = ones if rows else self.numbers(shape, dtype) + ones
            counts = [self.count(rank, rows) for rank in range(len(self.rows))]
            parts = [np.asarray(times * count, dtype) for count in counts]
            return Given(Partial(how, rows), parts, np.asarray(times * sum(counts), dtype), tuple(shape))
        if how is How.SHARE:
            value = self.numbers(shape, dtype)
            return Given(Partial(how), [np.asarray(value * w, dtype) for w in weights], value, tuple(shape))
        if how is How.ALIKE:
            value = self.numbers(shape, dtype)
            nothing = np.full(shape, np.nan if np.issubdtype(np.dtype(dtype), np.floating) else 0, dtype)
            return Given(Partial(how), [value if count else nothing for count in self.rows], value, tuple(shape))
        values = [np.asarray(self.numbers(shape, dtype)) for _ in self.rows]
        if dtype == "bool":
            nothing: Any = how is How.MIN
        else:
            nothing = {How.SUM: 0, How.MEAN: np.nan, How.MAX: -np.inf, How.MIN: np.inf}[how]
        parts = [value if count else np.full(shape, nothing, dtype) for value, count in zip(values, self.rows, strict=True)]
        return Given(Partial(how), parts, self.combined(Partial(how), parts), tuple(shape))

    def lengths(self, *sizes: int, axis: int = 0, rows: tuple[str, ...] = ("a",), times: int = 1) -> Given:
        counts = [self.count(rank, rows) * times for rank in range(len(self.rows))]
        parts = [np.asarray([*sizes[:axis], count, *sizes[axis:]], "int32") for count in counts]
        whole = np.asarray([*sizes[:axis], sum(counts), *sizes[axis:]], "int32")
        if self.is_static:  # a constant on each rank, as TensorFlow makes it
            return Given(Replicate(), parts, whole, whole.shape, True)
        return Given(Lengths(axis, rows if times == 1 else (), True, 1 if times == 1 else None), parts, whole, whole.shape)

    def places(self, *, are_all: bool = True, rows: tuple[str, ...] = ("a",), columns: int = 0, below: int = 3) -> Given:
        counts = [self.count(rank, rows) for rank in range(len(self.rows))]
        parts = []
        for count in counts:
            some = (
                np.arange(count) if are_all else np.sort(self._random.choice(count, self.one(0, 1, count) if count else 0, False))
            )
            beside = [self._random.integers(0, below, len(some)) for _ in range(columns - 1)]
            parts.append(np.stack([some, *beside], 1).astype("int32") if columns else some.astype("int32"))
        whole = self.renumbered(rows, parts)
        order = np.argsort(whole[:, 0] if columns else whole, kind="stable")
        return Given(Places(are_all, rows), parts, whole[order], (None, columns) if columns else (None,))

    def renumbered(self, names: Sequence[str], parts: Sequence[np.ndarray], pieces: int = 1) -> np.ndarray:
        """Returns the numbers of rows of all ranks, one behind the other, as one device counts them."""
        begins = {}  # of each name and rank
        total = 0
        for place, name in enumerate(names):
            for rank in range(len(self.rows)):
                begins[place, rank] = total
                total += self.count(rank, [name]) * pieces
        found = []
        for rank, part in enumerate(parts):
            own = np.concatenate(
                [begins[p, rank] + np.arange(self.count(rank, [n]) * pieces) for p, n in enumerate(names)] or [[]]
            )
            numbers = part[:, :1] if part.ndim > 1 else part
            found.append(np.concatenate([own[numbers], part[:, 1:]], 1) if part.ndim > 1 else own[numbers])
        return np.concatenate(found).astype("int32")

    # Comparing.

    def combined(self, placement: Placement, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns what ranks' `parts` of a number of all rows are together."""
        assert isinstance(placement, Partial)
        have_rows = [part for part, count in zip(parts, self.rows, strict=True) if count]
        if placement.how in (How.MAX, How.MIN):
            reduce = np.maximum if placement.how is How.MAX else np.minimum
            return reduce.reduce(have_rows)
        weights = [count / sum(self.rows) if placement.how is How.MEAN else 1 for count in self.rows if count]
        return np.asarray(sum(part * w for part, w in zip(have_rows, weights, strict=True)))

    def check(self, placement: Placement, parts: list[np.ndarray], whole: np.ndarray, *, only_sizes: bool = False) -> None:
        """Fails unless `parts` are of `whole` what `placement` says."""
        compare: Callable[..., None] = _same_sizes if only_sizes else _close
        if isinstance(placement, Replicate):
            for part in parts:
                compare(part, whole)
        elif placement == Partial(How.ALIKE):
            for part, count in zip(parts, self.rows, strict=True):
                if count:
                    compare(part, whole)
        elif isinstance(placement, Partial):
            compare(self.combined(placement, parts), whole)
            if placement.how in (How.COUNT, How.SHARE):
                for part, count in zip(parts, self.rows, strict=True):
                    _close(part * (sum(self.rows) / 1), whole * count)
            if placement.rows and np.ndim(whole):
                names = [[name] for name in placement.rows] if whole.size == len(placement.rows) > 1 else [placement.rows]
            else:
                names = [placement.rows]
            if placement.rows:
                for rank, part in enumerate(parts):
                    _close(np.reshape(part, -1), [self.count(rank, each) for each in names])
        elif isinstance(placement, Lengths):
            axis = placement.axis
            for part in parts:
                _close(np.delete(part, axis), np.delete(whole, axis))
            self._check_sizes(placement, [int(part[axis]) for part in parts], int(whole[axis]))
        elif isinstance(placement, Places):
            for rank, part in enumerate(parts):
                count = self.count(rank, placement.rows) * (placement.pieces or 1)
                numbers = part[:, 0] if part.ndim > 1 else part
                assert np.all(np.diff(numbers) >= 0) and (not placement.are_all or list(numbers) == list(range(count)))
            _close(_sorted(self.renumbered(placement.rows, parts, placement.pieces or 1)), _sorted(whole))
        else:
            self._check_shard(placement, parts, whole, compare)

    def _check_shard(self, placement: Shard, parts: list[np.ndarray], whole: np.ndarray, compare: Callable[..., None]) -> None:
        axis = placement.axis
        sizes = [part.shape[axis] for part in parts]
        if placement.is_even:
            self._check_sizes(placement, sizes, whole.shape[axis])
        if not placement.is_joined:
            compare(np.concatenate(parts, axis), whole)
        elif placement.is_even:
            pieces = [np.split(part, self._ends(rank, placement, part.shape[axis]), axis) for rank, part in enumerate(parts)]
            compare(np.concatenate([np.concatenate(each, axis) for each in zip(*pieces, strict=True)], axis), whole)
        else:
            compare(_sorted(np.moveaxis(np.concatenate(parts, axis), axis, 0)), _sorted(np.moveaxis(whole, axis, 0)))

    def _ends(self, rank: int, placement: Shard, size: int) -> list[int]:
        counts = [self.count(rank, [name]) for name in placement.rows]
        times = size // max(sum(counts), 1)
        return [int(end) * times for end in np.cumsum(counts)[:-1]]

    def _check_sizes(self, placement: Shard | Lengths, sizes: list[int], whole: int) -> None:
        assert sum(sizes) == whole
        for rank, size in enumerate(sizes):
            if placement.is_even:
                assert size * sum(self.rows) == whole * self.rows[rank], f"uneven: {sizes} of {self.rows}"
            if placement.rows and placement.pieces is not None:
                assert size == self.count(rank, placement.rows) * placement.pieces, f"{placement}: {sizes}"


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation, its inputs and its attributes."""

    type: str
    given: dict[str, Any]
    only_sizes: bool = False
    results: tuple[int, ...] | None = None  # that are compared; None: all

    def run(self, choose: Callable[[Given], np.ndarray]) -> list[np.ndarray]:
        result = getattr(tf.raw_ops, self.type)(
            **{name: _mapped(x, lambda g: tf.constant(choose(g))) for name, x in self.given.items()}
        )
        return tf.nest.flatten(result)


def holds(case: Case, world: World) -> bool:
    """Checks what the rule of a case says; returns whether it says anything."""
    ranks = range(len(world.rows))
    if world.is_static and _are_own_constants(case):
        return False
    try:
        claims = [_claims(case, world, rank if world.is_static else None) for rank in (ranks if world.is_static else [0])]
        if any(claim != claims[0] for claim in claims[1:]) or all(isinstance(claim, Unknown) for claim in claims[0]):
            return False
        parts = [case.run(lambda given, rank=rank: given.parts[rank]) for rank in ranks]
        whole = case.run(lambda given: given.whole)
    except _REFUSALS:
        return False
    is_known = False
    for place, claim in enumerate(claims[0]):
        if isinstance(claim, Unknown) or (case.results is not None and place not in case.results):
            continue
        each = [_array(part[place]) for part in parts]
        try:
            world.check(claim, each, _array(whole[place]), only_sizes=case.only_sizes)
        except (AssertionError, ValueError, IndexError) as error:
            inputs = {name: _mapped(x, lambda g: (g.placement, [p.shape for p in g.parts])) for name, x in case.given.items()}
            raise AssertionError(
                f"{case.type} of {inputs} is no {claim}: rows {world.rows}, static {world.is_static}: {error}"
            ) from error
        is_known = is_known or not isinstance(claim, Replicate) or claim.is_drawn or case.type.startswith(_MAY_BE_SAME)
    return is_known


def _are_own_constants(case: Case) -> bool:
    """Whether no input has rows, and a constant is a rank's own number of them: that it is this nobody can tell."""
    given = [x for x in tf.nest.flatten(list(case.given.values())) if isinstance(x, Given)]
    own = [x for x in given if isinstance(x.placement, Replicate) and not all(np.array_equal(x.whole, part) for part in x.parts)]
    return bool(own) and not any(isinstance(x.placement, Shard) for x in given)


_REFUSALS = (
    tf.errors.InvalidArgumentError,
    tf.errors.InternalError,
    tf.errors.UnimplementedError,
    NotImplementedError,
    ValueError,
)  # of what cannot be
_MAY_BE_SAME = (
    "TensorListLength",
    "Rank",
    "ConcatOffset",
    "BroadcastGradientArgs",
    "EmptyTensorList",
    "TensorListReserve",
    "Optional",
)


def _claims(case: Case, world: World, rank: int | None) -> list[Placement]:
    known: dict[str, Placement] = {}

    def traced(given: Given) -> tf.Tensor:
        value = given.parts[rank or 0]
        if given.is_constant:
            tensor = tf.constant(value)
        elif isinstance(given.placement, Lengths):
            dtype, at = value.dtype.name, given.placement.axis
            sizes = [tf.compat.v1.placeholder(dtype, ()) if axis == at else tf.constant(size) for axis, size in enumerate(value)]
            tensor = tf.stack(sizes)
        else:
            shape = value.shape if rank is not None else given.shape
            tensor = tf.compat.v1.placeholder(tf.as_dtype(value.dtype if value.dtype != object else "string"), shape)
        known[tensor.name] = given.placement
        return tensor

    with tf.Graph().as_default():
        result = getattr(tf.raw_ops, case.type)(**{name: _mapped(x, traced) for name, x in case.given.items()})
        op = tf.nest.flatten(result)[0].op
        return placements_of(TracedCall(op, [known.get(x.name, Replicate()) for x in op.inputs]))


def _mapped(x: Any, function: Callable[[Given], Any]) -> Any:
    if isinstance(x, Given):
        return function(x)
    return [_mapped(one, function) for one in x] if isinstance(x, list) and any(isinstance(one, Given) for one in x) else x


def _array(tensor: tf.Tensor) -> np.ndarray:
    return tensor.numpy() if isinstance(tensor.numpy(), np.ndarray) else np.asarray(tensor.numpy())


def _close(one: Any, other: Any) -> None:
    one, other = np.asarray(one), np.asarray(other)
    assert one.shape == other.shape, f"{one.shape} for {other.shape}"
    if one.dtype.kind in "SOUb":
        assert np.array_equal(one, other)
    else:
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def _same_sizes(one: Any, other: Any) -> None:
    assert np.shape(one) == np.shape(other), f"{np.shape(one)} for {np.shape(other)}"


def _sorted(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.reshape(len(rows), -1).T)] if rows.size else rows
