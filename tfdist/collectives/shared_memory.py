"""Collectives of processes on one machine through memory that they share. No TensorFlow here.

The members of a group map one file that lives in memory. Each has a region of it, of two slots, which only it writes, and a
socket to every other member. A collective is a number of turns:

    member 0   write own slot | tell the others | wait for all of them | read their slots
    member 1   write own slot | tell the others | wait for all of them | read their slots

so that every byte is copied once into the file and once out of it; sums are taken as it is read. Turns use the two slots one
after the other. Who has heard of turn t + 1 from everybody knows that everybody has read the slots of turn t, and may write them.

What is larger than a slot takes several turns. Sums are taken in group order, so that all members hold equal bits.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

SLOTS = 2
_SLOT_BYTES = 2 * 2**20
# Of a large group the slots are smaller: some systems give shared memory 64 MiB in all.
_FILE_BYTES = 32 * 2**20
_LEAST_SLOT_BYTES = 64 * 2**10
# Up to so many bytes every member adds up everything; beyond, each adds up its part, and the sums are gathered.
_DIRECT_BYTES = 64 * 2**10
# TensorFlow takes arrays that begin at a multiple of this as they are, and copies others.
_ALIGNMENT = 64
_REDUCE: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class PeerLost(RuntimeError):
    """Another member has ended, or this one was told to give up."""


def slot_bytes(size: int) -> int:
    """Returns the size of a slot of a group of `size` members, a multiple of 64."""
    fitting = _FILE_BYTES // (size * SLOTS) // _ALIGNMENT * _ALIGNMENT
    return max(_LEAST_SLOT_BYTES, min(_SLOT_BYTES, fitting))


def file_bytes(size: int) -> int:
    """Returns the size of the file of a group of `size` members."""
    return size * SLOTS * slot_bytes(size)


class Exchange:
    """One member's part of what a group on one machine shares.

    Its methods are called by all members in the same order, one at a time.

    Args:
        memory: the file, mapped: of each member its slots.
        place: this member's index in the group.
        peers: connected sockets to all others, by their places.
    """

    def __init__(self, memory: mmap.mmap, place: int, peers: Mapping[int, socket.socket]):
        self.size = len(peers) + 1
        self.place = place
        # Others first that come next: not all members read the same region at once.
        self._others = [(place + step) % self.size for step in range(1, self.size)]
        self._peers = dict(peers)
        self._regions = np.frombuffer(memory, np.uint8).reshape(self.size, SLOTS, -1)
        self._slot_bytes = self._regions.shape[-1]
        self._turns = 0
        self._word = bytearray(_WORD.size)
        self._reason: str | None = None

    def abort(self, reason: str) -> None:
        """Lets whoever waits, in another thread, and all later calls raise `PeerLost`."""
        self._reason = reason
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # its other end has gone
                peer.shutdown(socket.SHUT_RDWR)

    def all_gather(self, x: np.ndarray, key: int) -> np.ndarray:
        """Returns the members' arrays, of one shape, concatenated along axis 0. `key` is the same for all members."""
        x = np.asarray(x, order="C")
        found = aligned_empty((self.size * x.shape[0], *x.shape[1:]), x.dtype)
        mine, all_bytes = _bytes_of(x), _bytes_of(found).reshape(self.size, -1)
        for start in range(0, mine.size, self._slot_bytes):
            part = mine[start : start + self._slot_bytes]
            slots = self._turn(key, part)
            for other in self._others:
                all_bytes[other, start : start + part.size] = slots[other, : part.size]
        all_bytes[self.place] = mine
        return found

    def all_to_all(self, x: np.ndarray, key: int) -> np.ndarray:
        """Sends `x[i]` to member i, and returns what each has sent here: (N, ...) to (N, ...)."""
        x = np.asarray(x, order="C")
        found = aligned_empty(x.shape, x.dtype)
        mine, received = _bytes_of(x).reshape(self.size, -1), _bytes_of(found).reshape(self.size, -1)
        step = self._slot_bytes // self.size
        for start in range(0, mine.shape[1], step):
            part = mine[:, start : start + step]
            slots = self._turn(key, part)
            width = part.shape[1]
            for other in self._others:
                received[other, start : start + width] = slots[other, self.place * width : (self.place + 1) * width]
        received[self.place] = mine[self.place]
        return found

    def reduce_scatter(self, x: np.ndarray, key: int, dtype: Any = None) -> np.ndarray:
        """Returns the sum of the members' `x[place]`, taken and returned in `dtype` (None: x's): (N, ...) to (...)."""
        x = np.asarray(x, order="C")
        found = aligned_empty(x.shape[1:], dtype or x.dtype)
        mine, total = x.reshape(self.size, -1), found.reshape(-1)
        step = self._slot_bytes // (self.size * x.dtype.itemsize)
        for start in range(0, total.size, step):
            part = mine[:, start : start + step]
            slots = self._turn(key, part)
            width = part.shape[1]
            parts = [_typed(slots[member], x.dtype, self.place * width, width) for member in range(self.size)]
            parts[self.place] = part[self.place]
            _reduce_into(total[start : start + width], parts, np.add)
        return found

    def all_reduce(self, x: np.ndarray, key: int, reduce_op: str = "sum", dtype: Any = None) -> np.ndarray:
        """Returns the members' `x`, reduced elementwise ("sum", "max", "min") in `dtype` (None: x's), as x's dtype."""
        x = np.asarray(x, order="C")
        found = aligned_empty(x.shape, x.dtype)
        mine, total, reduce = x.reshape(-1), found.reshape(-1), _REDUCE[reduce_op]
        step = self._slot_bytes // x.dtype.itemsize
        for start in range(0, mine.size, step):
            part = mine[start : start + step]
            slots = self._turn(key, part)
            if part.nbytes <= _DIRECT_BYTES:
                self._reduce_part(slots, part, 0, part.size, total[start : start + part.size], reduce, dtype)
                continue
            width = -(-part.size // self.size)
            bounds = [min(member * width, part.size) for member in range(self.size + 1)]
            here = slice(start + bounds[self.place], start + bounds[self.place + 1])
            self._reduce_part(slots, part, bounds[self.place], bounds[self.place + 1], total[here], reduce, dtype)
            slots = self._turn(key, total[here])
            for other in self._others:
                count = bounds[other + 1] - bounds[other]
                total[start + bounds[other] : start + bounds[other + 1]] = _typed(slots[other], x.dtype, 0, count)
        return found

    def _reduce_part(
        self,
        slots: np.ndarray,
        part: np.ndarray,
        begin: int,
        end: int,
        total: np.ndarray,
        reduce: Callable[..., Any],
        dtype: Any,
    ) -> None:
        """Writes elements [begin, end) of the reduction of what all members wrote, this one `part`, to `total`."""
        parts = [_typed(slots[member], part.dtype, begin, end - begin) for member in range(self.size)]
        parts[self.place] = part[begin:end]
        if dtype is None or dtype == part.dtype:
            _reduce_into(total, parts, reduce)
        else:
            wide = np.empty(total.shape, dtype)
            _reduce_into(wide, parts, reduce)
            total[...] = wide

    def _turn(self, key: int, mine: np.ndarray) -> np.ndarray:
        """Writes `mine` to this member's slot, and returns everybody's slots (N, bytes) once they are written."""
        slots = self._regions[:, self._turns % SLOTS]
        self._turns += 1
        if mine.size:
            slots[self.place, : mine.nbytes].view(mine.dtype).reshape(mine.shape)[...] = mine
        word = _WORD.pack(key, self._turns)
        try:
            for other in self._others:
                self._peers[other].sendall(word)
            for other in self._others:
                self._hear(other, word)
        except OSError as error:
            raise PeerLost(self._reason or f"another member of the group has ended: {error}") from error
        return slots

    def _hear(self, other: int, word: bytes) -> None:
        """Waits until member `other` is at the same turn."""
        if self._peers[other].recv_into(self._word, _WORD.size, socket.MSG_WAITALL) != _WORD.size:
            raise PeerLost(self._reason or f"member {other} of the group has ended")
        if self._word != word:
            here, there = _WORD.unpack(word), _WORD.unpack(self._word)
            raise PeerLost(f"members of the group are at different collectives: {here} here, {there} at member {other}")


_WORD = struct.Struct("<qq")  # key, turn


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an array that TensorFlow takes over without a copy."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(count + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)


def _bytes_of(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).view(np.uint8)


def _typed(slot: np.ndarray, dtype: Any, begin: int, count: int) -> np.ndarray:
    return slot[begin * dtype.itemsize : (begin + count) * dtype.itemsize].view(dtype)


def _reduce_into(total: np.ndarray, parts: list[np.ndarray], reduce: Callable[..., Any]) -> None:
    reduce(parts[0], parts[1], out=total, dtype=total.dtype, casting="same_kind")
    for part in parts[2:]:
        reduce(total, part, out=total, dtype=total.dtype, casting="same_kind")
