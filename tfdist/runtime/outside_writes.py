"""Assignments of workers outside of steps, to variables that all hold: the same on all, or the job ends with the variable's name.

    worker 0    model.set_weights(a)     program 7   tells "before 7: kernel 5fa3"    and waits for nobody
    worker 1                             program 7   hears it, now or later, and has said nothing of 7: they part

Each worker numbers its programs of collectives (steps, evaluations, readings), which are the same on all, and tells: see `turns`.
A word has digests.
"""

import itertools
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

Written = list[list[Any]]  # of each assignment the variable's number, its name and a digest, in order

_TOLERANCE = 1e-5  # of the norm: the last bits of floats may differ between machines
_WEIGHTS = np.random.default_rng(0).normal(size=2**16)
FIX = (
    "Let every worker assign the same: `value = strategy.from_chief(value)`, called by all, returns the first worker's value on "
    "each. Or load one file everywhere, and seed what is drawn."
)


def digest_of(value: Any) -> list[list[float]]:
    """Returns a digest of what is assigned: of floats their number, a weighted sum and the norm, of all else a checksum."""
    return [_digest(np.asarray(leaf)) for leaf in tf.nest.flatten(value, expand_composites=True)]


def _digest(array: np.ndarray) -> list[float]:
    if array.dtype == object:
        return [zlib.crc32(repr(array.tolist()).encode())]
    if tf.as_dtype(array.dtype).is_integer or array.dtype.kind in "bSU":
        return [zlib.crc32(np.ascontiguousarray(array).tobytes())]
    flat = np.ascontiguousarray(array).reshape(-1)
    flat = flat.view(flat.real.dtype) if array.dtype.kind == "c" else flat
    total = norm = 0.0
    for number, start in enumerate(range(0, flat.size, _WEIGHTS.size)):
        part = np.nan_to_num(flat[start : start + _WEIGHTS.size].astype(np.float64), posinf=1.0, neginf=-1.0)
        total += float(part @ _WEIGHTS[: part.size]) * np.cos(number + 1.0)
        norm += float(part @ part)
    return [flat.size, total, norm**0.5]


def is_same(one: list[Any], other: list[Any]) -> bool:
    """Whether two assignments may be the same: of one variable, and of one value."""
    pairs = list(zip(one[2], other[2], strict=False))
    sizes = one[0] == other[0] and [len(x) for x in one[2]] == [len(x) for x in other[2]] and all(x[0] == y[0] for x, y in pairs)
    return sizes and all(abs(x[1] - y[1]) <= _TOLERANCE * max(x[2], y[2]) for x, y in pairs if len(x) > 1)


def difference(own: Written, theirs: Written, task: Any, other: Any) -> str:
    """Returns how what the worker `other` has assigned differs from what `task` has, in words; "" if it does not."""
    pairs = itertools.zip_longest(own, theirs, fillvalue=[-1, "", []])
    different = next((pair for pair in pairs if not is_same(*pair)), None)
    if different is None:
        return ""
    both: Any = zip((task, other), different, strict=True)
    (first, (number, name, _)), (second, (its_number, its_name, _)) = sorted(both, key=lambda one: one[1][0] < 0)
    there = f"{'not' if its_number < 0 else 'another' if its_number == number else repr(its_name)} on {second}"
    return f"Workers have assigned different values, outside of steps, to what all hold: {name!r} on {first}, and {there}."
