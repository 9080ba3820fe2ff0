"""Blocks in which something is set, and after which it is as it was before, also after an error."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def attributes(owner: Any, **values: Any) -> Iterator[None]:
    """A block in which `owner`, any object, has these attributes; after it those that it had, None where there was none."""
    before = {name: getattr(owner, name, None) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def context_value(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    """A block in which `variable` is `value`."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
