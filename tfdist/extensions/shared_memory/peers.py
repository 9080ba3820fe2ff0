"""The basis of both protocols of shared memory: sockets to the other processes. No TensorFlow here.

Bytes go through memory that one process writes and others read; a short packet over a socket tells that they are there. Who
waits, waits for a packet, and so learns at once of a process that has ended, or of `abort` in this one.
"""

import contextlib
import select
import socket
from collections.abc import Iterator, Mapping


class PeerLost(RuntimeError):
    """Another process has ended, or `abort` was called in this one."""


class Peers:
    """Connected sockets of packets (`SOCK_SEQPACKET`) to the other processes, by number, which errors call `noun`.

    With `waits_in_calls`, `send` and `receive_into` wait; else `wait` does, for all of them at once.
    """

    def __init__(self, connections: Mapping[int, socket.socket], noun: str, *, waits_in_calls: bool = True):
        self._connections = dict(connections)
        self._numbers = {connection.fileno(): number for number, connection in connections.items()}
        self._noun = noun
        self.ended: set[int] = set()
        for connection in connections.values():
            connection.setblocking(waits_in_calls)
        self._reason: str | None = None

    def abort(self, reason: str) -> None:
        """Lets whoever waits, in another thread, and all later calls raise `PeerLost` with `reason`."""
        self._reason = reason
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # its other end has gone
                connection.shutdown(socket.SHUT_RDWR)

    def lost(self, number: int, error: OSError | None = None) -> PeerLost:
        """Returns what to raise when `number` has ended."""
        return PeerLost(self._reason or f"{self._noun} {number} has ended{f': {error}' if error else ''}")

    def send(self, number: int, packet: bytes) -> None:
        """Sends `packet`, waiting for room if there is none."""
        try:
            self._connections[number].sendall(packet)
        except OSError as error:
            raise self.lost(number, error) from error

    def receive_into(self, number: int, packet: bytearray) -> None:
        """Waits for the next packet, which fills `packet`."""
        try:
            count = self._connections[number].recv_into(packet, len(packet), socket.MSG_WAITALL)
        except OSError as error:
            raise self.lost(number, error) from error
        if count != len(packet):
            raise self.lost(number)

    def try_send(self, number: int, packet: bytes) -> bool:
        """Sends `packet` if there is room, and returns whether there was."""
        try:
            self._connections[number].send(packet)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self.lost(number, error) from error
        return True

    def arrived(self, number: int, size: int) -> Iterator[bytes]:
        """Yields the packets, of `size`, that have arrived; notes when the other end has gone."""
        while number not in self.ended:
            try:
                packet = self._connections[number].recv(size)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if packet:
                yield packet
            else:
                self.ended.add(number)

    def wait(self, milliseconds: int, room_for: int | None = None) -> list[int]:
        """Waits for a moment until something arrives, or there is room to send to `room_for`; returns from whom it has come."""
        poll = select.poll()
        for number, connection in self._connections.items():
            if number not in self.ended:
                poll.register(connection, select.POLLIN | (select.POLLOUT if number == room_for else 0))
        return [self._numbers[descriptor] for descriptor, event in poll.poll(milliseconds) if event & ~select.POLLOUT]
