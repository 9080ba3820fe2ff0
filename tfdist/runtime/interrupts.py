"""Notices that Ctrl-C was pressed while the main thread could not look: it is in a call that returns when TensorFlow has done.

Python's handlers run in the main thread only, between two of its instructions. But the signal's number is written to a socket at
once, which another thread reads.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from typing import Any


class Interrupts:
    """SIGINTs that came, and whether the program's handler has been called. Made in the main thread; else it notices nothing.

    The handler itself stays, with what a program makes of it.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._handler: Any = signal.getsignal(signal.SIGINT)
        self._signals, write = socket.socketpair()
        for end in (self._signals, write):
            end.setblocking(False)
        if threading.current_thread() is not threading.main_thread() or not callable(self._handler):
            return
        before = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        if before != -1:  # somebody else's, who waits for signals as we do
            signal.set_wakeup_fd(before)
            return
        self._write = write  # kept open
        os.register_at_fork(after_in_child=_let_go)  # of what is this process's
        signal.signal(signal.SIGINT, self._handle)

    def unhandled_seconds(self) -> float:
        """Returns how long ago a SIGINT came that has not been handled; 0 where there is none."""
        with contextlib.suppress(BlockingIOError):
            if signal.SIGINT in self._signals.recv(4096) and signal.getsignal(signal.SIGINT) == self._handle:
                self._since = time.monotonic()
        return 0.0 if self._since is None else time.monotonic() - self._since

    def _handle(self, number: int, frame: Any) -> Any:
        self.unhandled_seconds()  # what has come is handled now
        self._since = None
        return self._handler(number, frame)


def _let_go() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
