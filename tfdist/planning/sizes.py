"""Sizes and counts as people write them: "80 GB", "80GiB", 8e10, "1.4T"."""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

from tfdist import errors

_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
# A comma stands between thousands: "1,5" may be one and a half, or fifteen mistyped, and is refused.
_NUMBER = r"((?:\d{1,3}(?:,\d{3})+|[\d_]*)\.?\d*(?:e[+-]?\d+)?)"
_SIZE = re.compile(rf"\s*{_NUMBER}\s*(?:([kmgtp]?)(i?)b)?\s*", re.IGNORECASE)
_COUNT = re.compile(rf"\s*{_NUMBER}\s*([kmbt]?)\s*", re.IGNORECASE)
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def bytes_of(name: str, value: Any) -> float:
    """Returns a number of bytes: 8e10, "80 GB" (1000 MB each), "80GiB" (1024 MiB each), "8e10".

    Raises:
        ValueError: the argument called `name` is no such thing, or not positive.
    """
    fix = 'Write "80 GB", "80GiB" or 8e10.'
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        number = _number(match[1]) if match else math.nan
        scale = (1024 if match and match[3] else 1000) ** _PREFIXES[(match[2] or "").lower()] if match else 1
        value, given = number * scale, value
    else:
        given = value
    return _positive(name, value, given, "a size in bytes", fix)


def count_of(name: str, value: Any) -> float:
    """Returns a number of tokens, parameters or operations: 1.4e12, "1.4T", "300 B" (billions).

    Raises:
        ValueError: the argument called `name` is no such thing, or not positive.
    """
    given = value
    if isinstance(value, str):
        match = _COUNT.fullmatch(value)
        value = _number(match[1]) * _COUNTS[match[2].lower()] if match else math.nan
    return _positive(name, value, given, "a positive number", 'Write 1.4e12, "1.4T" or "300B".')


def _number(text: str) -> float:
    try:
        return float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return math.nan


def _positive(name: str, value: Any, given: Any, expected: str, fix: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise errors.value_error(f"`{name}` must be {expected}.", fix=fix, **{name: given})
    return float(value)
