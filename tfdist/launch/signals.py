"""Signals as something to wait for beside pipes and processes, instead of exceptions at any line."""

from __future__ import annotations

import select
import signal
import socket
from types import TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Holds SIGINT and SIGTERM back while it is entered, in the main thread: `read` returns those that came.

    `fileno` makes it an object to register with a selector.
    """

    def __enter__(self) -> Self:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        # Python's handler writes the signal's number to this descriptor.
        self._previous_fd = signal.set_wakeup_fd(self._write.fileno())
        # A handler that does nothing, because an ignored signal would not be written there.
        self._previous_handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._read.close()
        self._write.close()

    def fileno(self) -> int:
        return self._read.fileno()

    def read(self) -> list[signal.Signals]:
        """Returns the signals that came since the last call, in order."""
        try:
            numbers = self._read.recv(4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in SIGNALS]

    def wait(self, seconds: float) -> list[signal.Signals]:
        """Waits at most `seconds` for a signal; returns those that came."""
        select.select([self], [], [], seconds)
        return self.read()
