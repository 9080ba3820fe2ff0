"""Where an extension takes the place of what the core does without it."""

from typing import Generic, TypeVar

T = TypeVar("T")


class Place(Generic[T]):
    """Holds, as `now`, the core's off state, until an extension that is imported puts its own object there.

    Args:
        off: does nothing, and says in its docstring what is so then.
    """

    def __init__(self, off: T):
        self.now = off
