"""Sizes and counts as people write them: "80 GB", "80GiB", 8e10, "1.4T"."""

import math
import numbers
import re
from collections.abc import Mapping
from typing import Any

from tfdist import errors

# A comma stands between thousands: "1,5" may be one and a half, or fifteen mistyped, and is refused.
_NUMBER = re.compile(r"\s*((?:\d{1,3}(?:,\d{3})+|[\d_]*)\.?\d*(?:e[+-]?\d+)?)\s*([a-z]*)\s*")
_BYTES = {"": 1} | {f"{x}{i}b": base**n for i, base in (("", 1000), ("i", 1024)) for n, x in enumerate(("", *"kmgtp"))}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def bytes_of(name: str, value: Any) -> float:
    """Returns a number of bytes: 8e10, "80 GB" (1000 MB each), "80GiB" (1024 MiB each), "8e10".

    Raises:
        ValueError: the argument called `name` is no such thing, or not positive.
    """
    return _positive(name, value, _BYTES, "a size in bytes", 'Write "80 GB", "80GiB" or 8e10.')


def count_of(name: str, value: Any) -> float:
    """Returns a number of tokens, parameters or operations: 1.4e12, "1.4T", "300 B" (billions).

    Raises:
        ValueError: the argument called `name` is no such thing, or not positive.
    """
    return _positive(name, value, _COUNTS, "a positive number", 'Write 1.4e12, "1.4T" or "300B".')


def _positive(name: str, given: Any, units: Mapping[str, float], expected: str, fix: str) -> float:
    value = given
    if isinstance(given, str):
        match = _NUMBER.fullmatch(given.lower())
        try:
            value = float(match[1].replace(",", "").replace("_", "")) * units[match[2]] if match else math.nan
        except (ValueError, KeyError):
            value = math.nan
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise errors.value_error(f"`{name}` must be {expected}.", fix=fix, **{name: given})
    return float(value)
