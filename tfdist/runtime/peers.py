"""Connections of this worker to every other: what they tell each other, and for how long one has been silent. No TensorFlow here.

A word is a dictionary, sent as one line of JSON. Nothing waits for a peer: what it does not read stays with the system, and what
is too much for that is kept until it reads again.
"""

import contextlib
import json
import os
import selectors
import socket
import threading
import time
import weakref
from typing import Any

Word = dict[str, Any]

# Of the time between two looks no more than this counts as silence, beside what was waited for: a process that was itself
# stopped, or did not come to look, knows nothing of others.
_LATE_SECONDS = 1.0
_RECEIVE_BYTES = 1 << 16


class Peers:
    """The connections of one worker, by the others' worker index.

    `listen` is for one thread to call again and again; the rest is for any.
    """

    def __init__(self) -> None:
        self._connections: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._listened = time.monotonic()
        self._is_closed = False
        here = weakref.ref(self)
        # Or the connections of a worker that dies would live on in what it has forked, and nobody would notice its end.
        os.register_at_fork(after_in_child=lambda: _forget(here()))

    def add(self, index: int, connection: socket.socket) -> bool:
        """Takes over the connection to worker `index`; returns False, and takes nothing, when there is one, or all are closed."""
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self._is_closed or index in self._connections:
                return False
            self._connections[index] = _Connection(connection)
            self._selector.register(connection, selectors.EVENT_READ, index)
        return True

    def indices(self) -> set[int]:
        """Returns the workers that are connected."""
        with self._lock:
            return set(self._connections)

    def tell(self, word: Word, *, may_be_lost: bool = False) -> None:
        """Sends `word` to all; one that `may_be_lost` is not sent to who has not read the words before it."""
        line = json.dumps(word).encode() + b"\n"
        with self._lock:
            for connection in self._connections.values():
                connection.send(b"" if may_be_lost and connection.unsent else line)

    def listen(self, seconds: float) -> list[tuple[int, Word | None]]:
        """Waits for words, at most so long; returns them by who has sent them, None for who has gone."""
        ready = self._selector.select(seconds)
        now = time.monotonic()
        passed, self._listened = min(now - self._listened, seconds + _LATE_SECONDS), now
        found: list[tuple[int, Word | None]] = []
        with self._lock:
            for connection in self._connections.values():
                connection.silence += passed
            for key, _ in ready:
                connection = self._connections[key.data]
                found += [(key.data, word) for word in connection.receive()]
                if connection.has_ended:
                    self._selector.unregister(key.fileobj)
                    self._connections.pop(key.data).socket.close()
                    found.append((key.data, None))
        return found

    def silences(self) -> dict[int, float]:
        """Returns, by worker, for how many seconds nothing has come from it while this process looked."""
        with self._lock:
            return {index: connection.silence for index, connection in self._connections.items()}

    def excuse(self, index: int, seconds: float) -> None:
        """Takes so much off the silence of worker `index`, who is known to live."""
        with self._lock:
            if index in self._connections:
                self._connections[index].silence -= seconds

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            self._is_closed = True
            for connection in self._connections.values():
                self._selector.unregister(connection.socket)
                connection.socket.close()
            self._connections.clear()


class _Connection:
    """One connection: words that are not sent or not complete yet, and the seconds since the last one."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.unsent = b""
        self.silence = 0.0
        self.has_ended = False
        self._received = b""

    def send(self, line: bytes) -> None:
        self.unsent += line
        with contextlib.suppress(OSError):  # it does not read now; or it has gone, which `receive` tells
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]

    def receive(self) -> list[Word]:
        try:
            while data := self.socket.recv(_RECEIVE_BYTES):
                self._received += data
                self.silence = 0.0
            self.has_ended = True
        except BlockingIOError:
            pass
        except OSError:  # reset
            self.has_ended = True
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines]


def _forget(peers: Peers | None) -> None:
    """In a forked process: lets go of the connections, which stay those of the process that it was forked from."""
    if peers is not None:
        peers._selector.close()
        for connection in peers._connections.values():
            connection.socket.close()
        peers._connections = {}
