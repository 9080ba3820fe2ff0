"""Doing something around every assignment to a variable: the variable gets a class of its own, with methods that do it."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Does what there is to do when the variable is written, and writes it: calls its second argument and returns what that returns.
Around = Callable[[Any, Callable[[], Any]], Any]

_WRITES = ("assign", "scatter_", "batch_scatter_", "_strided_slice_assign")


def watch_writes(variable: tf.Variable, around: Around) -> None:
    """Lets `around(variable, write)` be called for each assignment to `variable`, of one device, traced or run.

    What writes by the handle, as an optimizer's own step does, is not seen.
    """
    kind: Any = type(variable)
    variable.__class__ = _watched(kind, around)


@functools.cache
def _watched(kind: Any, around: Around) -> Any:
    def watching(name: str) -> Callable[..., Any]:
        original = getattr(kind, name)

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return around(self, functools.partial(original, self, *args, **kwargs))

        return method

    return type(kind.__name__, (kind,), {name: watching(name) for name in dir(kind) if name.startswith(_WRITES)})
