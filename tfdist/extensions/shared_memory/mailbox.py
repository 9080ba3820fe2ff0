"""Messages between processes of one machine through memory that they share. No TensorFlow here.

Each process has memory of its own, in slots. A message is written to a free slot, its notice goes over a socket, and who has read
the slot marks it as free.

    sender                                  receiver
    mark a free slot as taken, write it
    ── notice: key, slot, size ──────────▶  wait for the notice of this key; keep those of others
                                            read the slot, mark it as free

Sending waits for nobody: where the slot that was used least lately is not free there is a new one, so that the memory grows to
what is under way at once. A socket has room for some hundred notices that are not read yet; whoever waits, for a notice or for
such room, reads all that have come, and so no two processes wait for each other.
"""

import io
import os
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

import numpy as np

from tfdist.extensions.shared_memory.peers import PeerLost, Peers

# The first byte of a slot tells whether it is taken; from here on it holds the message.
_HEADER_BYTES = 64
_FREE, _TAKEN = b"\0", b"\1"
# A message's key; where its slot begins; its length.
_NOTICE = struct.Struct("<qqq")
# Linux reads and writes at most 2 GiB at once.
_MOST_BYTES = 2**30
# Two threads may wait at once, and one may read what the other waits for.
_LOOK_AGAIN_MS = 50


class Mailbox:
    """One process's messages to and from others on its machine.

    `send` and `receive` may run side by side, in several threads; of one peer and key, one `receive` at a time. Its own memory is
    a file, empty at first; connected sockets of packets (`SOCK_SEQPACKET`) and files of memory lead to the others, by rank.
    """

    def __init__(self, memory: io.FileIO, connections: Mapping[int, socket.socket], memories: Mapping[int, io.FileIO]):
        self._memory = memory
        self._used = 0  # bytes of it
        # By their length, where they begin; first the one that was used least lately.
        self._slots: defaultdict[int, deque[int]] = defaultdict(deque)
        self.peers = Peers(connections, "rank", waits_in_calls=False)
        self._memories = dict(memories)
        self._arrived: defaultdict[tuple[int, int], deque[tuple[int, ...]]] = defaultdict(deque)
        self._reading = threading.Lock()
        self._writing = threading.Lock()

    def send(self, destination: int, key: int, x: np.ndarray) -> None:
        """Sends `x`, which may change as soon as this returns, to `destination`."""
        message = _bytes_of(np.asarray(x, order="C"))
        with self._writing:
            slot = self._free_slot(_HEADER_BYTES + message.nbytes)
        for start in range(0, message.nbytes, _MOST_BYTES):
            os.pwrite(self._memory.fileno(), message[start : start + _MOST_BYTES], slot + _HEADER_BYTES + start)
        notice = _NOTICE.pack(key, slot, message.nbytes)
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
        slot, count = arrived.popleft()
        if found.nbytes != count:
            raise PeerLost(
                f"rank {source} has sent {count:,} bytes instead of the {found.nbytes:,} of {found.shape}, {found.dtype}"
            )
        message, memory = _bytes_of(found), self._memories[source].fileno()
        for start in range(0, count, _MOST_BYTES):
            os.preadv(memory, [message[start : start + _MOST_BYTES]], slot + _HEADER_BYTES + start)
        os.pwrite(memory, _FREE, slot)

    def _free_slot(self, count: int) -> int:
        """Returns where a slot for `count` bytes begins, marked as taken."""
        length = 1 << (count - 1).bit_length()
        memory, slots = self._memory.fileno(), self._slots[length]
        if slots and os.pread(memory, 1, slots[0]) == _FREE:
            slot = slots.popleft()
        else:
            slot = self._used
            self._used += length
        slots.append(slot)
        os.pwrite(memory, _TAKEN, slot)
        return slot

    def _read_notices(self, ranks: Iterable[int]) -> None:
        with self._reading:
            for rank in ranks:
                for notice in self.peers.arrived(rank, _NOTICE.size):
                    key, *place = _NOTICE.unpack(notice)
                    self._arrived[rank, key].append(tuple(place))


def _bytes_of(x: np.ndarray) -> memoryview:
    """Returns the bytes of `x`, not a copy."""
    return x.reshape(-1).view(np.uint8).data
