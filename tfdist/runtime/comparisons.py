"""Values that must be the same on all workers, and that come to each at a time of its own: nobody waits for another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

# Returns the words for how the value of worker `index` differs from this worker's; "" if it does not.
Difference = Callable[[int, Any], str]

# Values whose counterparts never come, since another worker has read less far ahead, are forgotten at last.
_MOST_WAITING = 4096


class Comparisons:
    """The values of this worker and of `num_others`, by key, until they have been compared. For any thread."""

    def __init__(self, num_others: int):
        self._num_others = num_others
        self._own: dict[str, tuple[Difference, set[int]]] = {}  # and with whom it has been compared
        self._theirs: dict[str, dict[int, Any]] = {}
        self._lock = threading.Lock()

    def add(self, key: str, difference: Difference) -> str:
        """Takes what this worker's value of `key` is compared by; returns the words for a difference, "" if none is known."""
        with self._lock:
            heard = self._theirs.pop(key, {})
            _put(self._own, key, (difference, set()))
            return next((words for index, value in heard.items() if (words := self._compare(key, index, value))), "")

    def hear(self, index: int, key: str, value: Any) -> str:
        """Takes the `value` of worker `index`; returns the words for a difference, "" if none is known."""
        with self._lock:
            if key in self._own:
                return self._compare(key, index, value)
            _put(self._theirs, key, {**self._theirs.get(key, {}), index: value})
            return ""

    def _compare(self, key: str, index: int, value: Any) -> str:
        difference, compared = self._own[key]
        compared.add(index)
        words = difference(index, value)
        if len(compared) == self._num_others:
            del self._own[key]
        return words


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    values[key] = value
    if len(values) > _MOST_WAITING:
        del values[next(iter(values))]
