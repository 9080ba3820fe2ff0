"""The wording of tfdist's errors, in one grammar.

An error names the argument in backticks, says what was expected and what was received, and ends with the fix:

    raise errors.value_error("`prefetch` must be an integer of at least 0.", prefetch=-1)

`ValueError` is the user's mistake, `NotImplementedError` is our limit, `RuntimeError` is a call in the wrong place.
"""

import warnings
from typing import Any

# The exit code of a worker that ends because another one has failed; a launcher looks for that other one.
PEER_FAILED_EXIT_CODE = 78


def message(expected: str, *, fix: str = "", **received: Any) -> str:
    """One error text: `expected`, then "Received: name=value, ...", then the fix.

    Args:
        expected: a full sentence that names the argument in backticks and says what must hold.
        fix: a full sentence that tells what to do instead; may be empty when `expected` already does.
        **received: the values that were received, by argument name.
    """
    parts = [expected]
    if received:
        parts.append("Received: " + ", ".join(f"{name}={value!r}" for name, value in received.items()) + ".")
    if fix:
        parts.append(fix)
    return " ".join(parts)


def value_error(expected: str, *, fix: str = "", **received: Any) -> ValueError:
    """Returns the error of a mistake of the user; the arguments are those of `message`."""
    return ValueError(message(expected, fix=fix, **received))


def not_implemented(expected: str, *, fix: str = "", **received: Any) -> NotImplementedError:
    """Returns the error of a limit of tfdist; the arguments are those of `message`."""
    return NotImplementedError(message(expected, fix=fix, **received))


def runtime_error(expected: str, *, fix: str = "", **received: Any) -> RuntimeError:
    """Returns the error of a call in the wrong place or of a process that failed; the arguments are those of `message`."""
    return RuntimeError(message(expected, fix=fix, **received))


def warn(expected: str, *, fix: str = "", stacklevel: int = 3, **received: Any) -> None:
    """Warns, in the same grammar, as of who has called the function that calls this one; the others are those of `message`."""
    warnings.warn(message(expected, fix=fix, **received), stacklevel=stacklevel)


def check_integer(name: str, value: Any, least: int, *, fix: str = "") -> None:
    """Raises ValueError when the argument called `name` is not an integer (True and False are none) of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise value_error(f"`{name}` must be {expected}.", fix=fix, **{name: value})


def check_seconds(name: str, value: Any) -> None:
    """Raises ValueError when the argument called `name` is not a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise value_error(f"`{name}` must be a positive number of seconds.", **{name: value})
