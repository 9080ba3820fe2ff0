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

import io
import mmap
import os
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Self

import numpy as np

from tfdist.collectives.transports.shared_memory.peers import PeerLost, Peers, Segment, bytes_of

# The first bytes of a slot tell whether it is taken; the rest holds the message.
_HEADER_BYTES = 64
# A message's key; where a segment of memory begins, and its length; where in it the slot begins; the message's length.
_NOTICE = struct.Struct("<qqqqq")
# With what a process passes its memory to another.
_GREETING = b"memory"
# Memory grows by so much at least, or doubles; what nobody has written takes no room.
_LEAST_GROWTH = 2**20
# Two threads may wait at once, and one may read what the other waits for.
_LOOK_AGAIN_MS = 50


class Mailbox:
    """One process's messages to and from others on its machine.

    `send` and `receive` may run side by side, in several threads; of one peer and key, one `receive` at a time. Its own memory is
    a file, empty at first; connected sockets of packets (`SOCK_SEQPACKET`) and files of memory lead to the others, by rank.
    """

    def __init__(self, memory: io.FileIO, connections: Mapping[int, socket.socket], memories: Mapping[int, io.FileIO]):
        self._memory = memory
        self._segments = [Segment(memory, 0, 0)]
        self._used = 0  # bytes of the last segment
        self.peers = Peers(connections, "rank", waits_in_calls=False)
        self._own: defaultdict[int, list[_Slot]] = defaultdict(list)
        self._memories = dict(memories)
        self._theirs: dict[tuple[int, int], Segment] = {}
        self._arrived: defaultdict[tuple[int, int], deque[tuple[int, ...]]] = defaultdict(deque)
        self._reading = threading.Lock()
        self._writing = threading.Lock()

    @classmethod
    def connect(cls, connections: Mapping[int, socket.socket]) -> Self:
        """Makes this process's memory, and exchanges it with the others, by rank, who do the same.

        Raises:
            PeerLost: one of them has ended.
        """
        memory, memories = io.FileIO(os.memfd_create("tfdist"), "r+"), {}
        peers = Peers(connections, "rank")
        for rank in connections:
            with peers.talking_to(rank) as connection:
                socket.send_fds(connection, [_GREETING], [memory.fileno()])
        for rank in connections:
            with peers.talking_to(rank) as connection:
                _, descriptors, *_ = socket.recv_fds(connection, len(_GREETING), 1)
            if not descriptors:
                raise peers.lost(rank)
            memories[rank] = io.FileIO(descriptors[0], "r+")
        return cls(memory, connections, memories)

    def send(self, destination: int, key: int, x: np.ndarray) -> None:
        """Sends `x`, which may change as soon as this returns, to `destination`."""
        x = np.asarray(x, order="C")
        with self._writing:
            slot = self._free_slot(x.nbytes)
        slot.bytes[: x.nbytes].view(x.dtype)[...] = x.reshape(-1)
        notice = _NOTICE.pack(key, *slot.place, x.nbytes)
        while not self.peers.try_send(destination, notice):
            self._read_notices(self.peers.wait(_LOOK_AGAIN_MS, room_for=destination))

    def receive(self, source: int, key: int, found: np.ndarray) -> None:
        """Writes to `found` what `source` sends, or has sent, with `key`: of several messages the first."""
        arrived = self._arrived[source, key]
        self._read_notices([source])
        while not arrived:
            if source in self.peers.ended:
                raise self.peers.lost(source)
            self._read_notices(self.peers.wait(_LOOK_AGAIN_MS))
        start, length, offset, count = arrived.popleft()
        if found.nbytes != count:
            raise PeerLost(
                f"rank {source} has sent {count:,} bytes instead of the {found.nbytes:,} of {found.shape}, {found.dtype}"
            )
        segment = self._theirs.get((source, start))
        if segment is None:
            segment = self._theirs[source, start] = Segment(self._memories[source], start, length)
        slot = _Slot(segment, offset, _HEADER_BYTES + count)
        bytes_of(found)[...] = slot.bytes[:count]
        slot.is_taken[0] = False

    def _free_slot(self, count: int) -> _Slot:
        """Returns a slot for `count` bytes, marked as taken."""
        length = max(mmap.PAGESIZE, 1 << (count + _HEADER_BYTES - 1).bit_length())
        slot = next((slot for slot in self._own[length] if not slot.is_taken[0]), None)
        if slot is None:
            if self._used + length > self._segments[-1].length:
                end = self._segments[-1].end
                grown = max(length, end, _LEAST_GROWTH)
                self._memory.truncate(end + grown)
                self._segments.append(Segment(self._memory, end, grown))
                self._used = 0
            slot = _Slot(self._segments[-1], self._used, length)
            self._own[length].append(slot)
            self._used += length
        slot.is_taken[0] = True
        return slot

    def _read_notices(self, ranks: Iterable[int]) -> None:
        with self._reading:
            for rank in ranks:
                for notice in self.peers.arrived(rank, _NOTICE.size):
                    key, *place = _NOTICE.unpack(notice)
                    self._arrived[rank, key].append(tuple(place))


class _Slot:
    """Place for one message in a segment of memory."""

    def __init__(self, segment: Segment, offset: int, length: int):
        self.place = segment.start, segment.length, offset
        begin = offset + _HEADER_BYTES
        self.is_taken = segment.bytes[offset : offset + 8].view(np.int64)
        self.bytes = segment.bytes[begin : offset + length]
