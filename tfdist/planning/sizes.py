"""Sizes and counts as people write them: "80 GB", "80GiB", 8e10, "1.4T"."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable
from typing import Any

from tfdist import errors

_PREFIXES = " kmgtp"
# A comma stands between thousands: "1,5" may be one and a half, or fifteen mistyped, and is refused.
_NUMBER = r"((?:\d{1,3}(?:,\d{3})+|[\d_]*)\.?\d*(?:e[+-]?\d+)?)"
_SIZE = re.compile(rf"\s*{_NUMBER}\s*(?:([kmgtp]?)(i?)b)?\s*")
_COUNT = re.compile(rf"\s*{_NUMBER}\s*([kmbt]?)\s*")
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def bytes_of(name: str, value: Any) -> float:
    """Returns a number of bytes: 8e10, "80 GB" (1000 MB each), "80GiB" (1024 MiB each), "8e10".

    Raises:
        ValueError: the argument called `name` is no such thing, or not positive.
    """

    def scale(prefix: str, binary: str) -> float:
        return (1024 if binary else 1000) ** _PREFIXES.index(prefix or " ")

    return _positive(name, value, _SIZE, scale, "a size in bytes", 'Write "80 GB", "80GiB" or 8e10.')


def count_of(name: str, value: Any) -> float:
    """Returns a number of tokens, parameters or operations: 1.4e12, "1.4T", "300 B" (billions).

    Raises:
        ValueError: the argument called `name` is no such thing, or not positive.
    """
    return _positive(name, value, _COUNT, _COUNTS.__getitem__, "a positive number", 'Write 1.4e12, "1.4T" or "300B".')


def _positive(name: str, given: Any, pattern: re.Pattern[str], scale: Callable[..., float], expected: str, fix: str) -> float:
    value = given
    if isinstance(given, str):
        match = pattern.fullmatch(given.lower())
        try:
            value = float(match[1].replace(",", "").replace("_", "")) * scale(*match.groups("")[1:]) if match else math.nan
        except ValueError:
            value = math.nan
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise errors.value_error(f"`{name}` must be {expected}.", fix=fix, **{name: given})
    return float(value)
