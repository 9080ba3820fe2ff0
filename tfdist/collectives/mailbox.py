"""Messages between processes of one machine through memory that they share. No TensorFlow here.

Each process has memory of its own, in slots, which only it writes and the others map. A message is written to a free slot, its
notice goes over a socket, and who has read the slot marks it as free.

    sender                                  receiver
    mark a free slot as taken, write it
    ── notice: key, slot, size ──────────▶  wait for the notice of this key; keep those of others
                                            read the slot, mark it as free

Sending waits for nobody: where no slot is free there is a new one, so that the memory grows to what is under way at once. A
socket has room for some hundred notices that are not read yet; whoever waits, for a notice or for such room, reads all that have
come, and so no two processes wait for each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import mmap
import os
import select
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Self

import numpy as np

from tfdist.collectives.shared_memory import PeerLost

# The first bytes of a slot tell whether it is taken; the rest holds the message.
_HEADER_BYTES = 64
# A message's key; where a stretch of memory begins, and its length; where in it the slot begins; the message's length.
_NOTICE = struct.Struct("<qqqqq")
# With what a process passes its memory to another.
_GREETING = b"memory"
# Memory grows by so much at least, or doubles; what nobody has written takes no room.
_LEAST_GROWTH = 2**20
# Two threads may wait at once, and one may read what the other waits for.
_LOOK_AGAIN_MS = 50


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another process: a connected socket of packets (`SOCK_SEQPACKET`), and the file of its memory."""

    connection: socket.socket
    memory: io.FileIO


class Mailbox:
    """One process's messages to and from others on its machine.

    `send` and `receive` may run side by side, in several threads; of one peer and key, one `receive` at a time.

    Args:
        memory: the file of this process's own memory, empty.
        peers: the others, by rank.
    """

    def __init__(self, memory: io.FileIO, peers: Mapping[int, Peer]):
        self._memory = memory
        self._stretches = [_Stretch(memory, 0, 0)]
        self._used = 0  # bytes of the last stretch
        self._peers = dict(peers)
        self._ranks = {peer.connection.fileno(): rank for rank, peer in self._peers.items()}
        for peer in self._peers.values():
            peer.connection.setblocking(False)
        self._own: defaultdict[int, list[_Slot]] = defaultdict(list)
        self._theirs: dict[tuple[int, int], _Stretch] = {}
        self._arrived: defaultdict[tuple[int, int], deque[tuple[int, ...]]] = defaultdict(deque)
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._ended: set[int] = set()
        self._reason: str | None = None

    @classmethod
    def connect(cls, connections: Mapping[int, socket.socket]) -> Self:
        """Makes this process's memory, and exchanges it with the others, by rank, who do the same.

        Raises:
            PeerLost: one of them has ended.
        """
        memory = io.FileIO(os.memfd_create("tfdist"), "r+")
        for rank, connection in connections.items():
            with _connected(rank):
                socket.send_fds(connection, [_GREETING], [memory.fileno()])
        peers = {}
        for rank, connection in connections.items():
            with _connected(rank):
                _, descriptors, *_ = socket.recv_fds(connection, len(_GREETING), 1)
            if not descriptors:
                raise PeerLost(f"rank {rank} has ended")
            peers[rank] = Peer(connection, io.FileIO(descriptors[0], "r+"))
        return cls(memory, peers)

    @property
    def peers(self) -> frozenset[int]:
        """The ranks of the others."""
        return frozenset(self._peers)

    def abort(self, reason: str) -> None:
        """Lets whoever waits, in another thread, and all later calls raise `PeerLost`."""
        self._reason = reason
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # its other end has gone
                peer.connection.shutdown(socket.SHUT_RDWR)

    def send(self, destination: int, key: int, x: np.ndarray) -> None:
        """Sends `x`, which may change as soon as this returns, to `destination`."""
        x = np.asarray(x, order="C")
        with self._writing:
            slot = self._free_slot(x.nbytes)
        slot.bytes[: x.nbytes].view(x.dtype)[...] = x.reshape(-1)
        notice = _NOTICE.pack(key, *slot.place, x.nbytes)
        connection = self._peers[destination].connection
        try:
            while not _sent(connection, notice):
                self._read_notices(self._wait(writable=connection))
        except OSError as error:
            raise PeerLost(self._reason or f"rank {destination} has ended: {error}") from error

    def receive(self, source: int, key: int, found: np.ndarray) -> None:
        """Writes to `found` what `source` sends, or has sent, with `key`: of several messages the first."""
        arrived = self._arrived[source, key]
        self._read_notices([source])
        while not arrived:
            if source in self._ended:
                raise PeerLost(self._reason or f"rank {source} has ended")
            self._read_notices(self._wait())
        start, length, offset, count = arrived.popleft()
        if found.nbytes != count:
            raise PeerLost(
                f"rank {source} has sent {count:,} bytes instead of the {found.nbytes:,} of {found.shape}, {found.dtype}"
            )
        stretch = self._theirs.get((source, start))
        if stretch is None:
            stretch = self._theirs[source, start] = _Stretch(self._peers[source].memory, start, length)
        slot = _Slot(stretch, offset, _HEADER_BYTES + count)
        found.reshape(-1).view(np.uint8)[...] = slot.bytes[:count]
        slot.is_taken[0] = False

    def _free_slot(self, count: int) -> _Slot:
        """Returns a slot for `count` bytes, marked as taken."""
        length = max(mmap.PAGESIZE, 1 << (count + _HEADER_BYTES - 1).bit_length())
        slot = next((slot for slot in self._own[length] if not slot.is_taken[0]), None)
        if slot is None:
            if self._used + length > self._stretches[-1].length:
                end = self._stretches[-1].end
                grown = max(length, end, _LEAST_GROWTH)
                self._memory.truncate(end + grown)
                self._stretches.append(_Stretch(self._memory, end, grown))
                self._used = 0
            slot = _Slot(self._stretches[-1], self._used, length)
            self._own[length].append(slot)
            self._used += length
        slot.is_taken[0] = True
        return slot

    def _wait(self, writable: socket.socket | None = None) -> list[int]:
        """Waits for a moment, until there are notices or room in `writable`; returns from whom there are some."""
        poll = select.poll()
        for rank, peer in self._peers.items():
            if rank not in self._ended:
                poll.register(peer.connection, select.POLLIN | (select.POLLOUT if peer.connection is writable else 0))
        return [self._ranks[number] for number, event in poll.poll(_LOOK_AGAIN_MS) if event & ~select.POLLOUT]

    def _read_notices(self, ranks: list[int]) -> None:
        with self._reading:
            for rank in ranks:
                while rank not in self._ended:
                    notice = _received(self._peers[rank].connection)
                    if notice is None:
                        break
                    if not notice:
                        self._ended.add(rank)
                        break
                    key, *place = _NOTICE.unpack(notice)
                    self._arrived[rank, key].append(tuple(place))


class _Stretch:
    """Bytes [start, start + length) of a process's memory, mapped."""

    def __init__(self, memory: io.FileIO, start: int, length: int):
        self.start = start
        self.length = length
        self.end = start + length
        self.bytes = np.frombuffer(mmap.mmap(memory.fileno(), length, offset=start) if length else b"", np.uint8)


class _Slot:
    """Place for one message in a stretch of memory."""

    def __init__(self, stretch: _Stretch, offset: int, length: int):
        self.place = stretch.start, stretch.length, offset
        begin = offset + _HEADER_BYTES
        self.is_taken = stretch.bytes[offset : offset + 8].view(np.int64)
        self.bytes = stretch.bytes[begin : offset + length]


@contextlib.contextmanager
def _connected(rank: int) -> Iterator[None]:
    """Tells who it is whose connection breaks within."""
    try:
        yield
    except OSError as error:
        raise PeerLost(f"rank {rank} has ended: {error}") from error


def _sent(connection: socket.socket, packet: bytes) -> bool:
    """Sends `packet` if there is room."""
    try:
        connection.send(packet)
    except BlockingIOError:
        return False
    return True


def _received(connection: socket.socket) -> bytes | None:
    """Returns a packet, empty when the other end has gone; None if there is none."""
    try:
        return connection.recv(_NOTICE.size)
    except BlockingIOError:
        return None
    except OSError:
        return b""
