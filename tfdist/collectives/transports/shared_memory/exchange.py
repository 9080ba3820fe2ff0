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

import dataclasses
import mmap
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.collectives.transports.shared_memory.peers import PeerLost, Peers, bytes_of

SLOTS = 2
_SLOT_BYTES = 2 * 2**20
_LEAST_SLOT_BYTES = 2**20
# All memory of a group counts as that of each member. Two have the larger slots, four the smaller.
_GROUP_BYTES = 8 * 2**20
# Of a large group the slots are smaller still: some systems give shared memory 64 MiB in all.
_MOST_GROUP_BYTES = 32 * 2**20
_SMALLEST_SLOT_BYTES = 64 * 2**10
# Up to so many bytes every member adds up everything; beyond, each adds up its part, and the sums are gathered.
_DIRECT_BYTES = 64 * 2**10
# A slot begins and ends at multiples of this.
_ALIGNMENT = 64
_REDUCE: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def slot_bytes(size: int) -> int:
    """Returns the size of a slot of a group of `size` members, a multiple of 64."""
    wanted = min(_SLOT_BYTES, max(_LEAST_SLOT_BYTES, _GROUP_BYTES // (size * SLOTS)))
    fitting = min(wanted, _MOST_GROUP_BYTES // (size * SLOTS))
    return max(_SMALLEST_SLOT_BYTES, fitting // _ALIGNMENT * _ALIGNMENT)


def file_bytes(size: int) -> int:
    """Returns the size of the file of a group of `size` members."""
    return size * SLOTS * slot_bytes(size)


class Exchange:
    """One member's part of what a group on one machine shares.

    Its methods are called by all members in the same order, one at a time. It stands at `place` in the group; `memory` is the
    file, mapped, with the slots of each member, and `peers` are connected sockets to all others, by their places.
    """

    def __init__(self, memory: mmap.mmap, place: int, peers: Mapping[int, socket.socket]):
        self.size = len(peers) + 1
        self.place = place
        # Others first that come next: not all members read the same region at once.
        self._others = [(place + step) % self.size for step in range(1, self.size)]
        self.peers = Peers(peers, "member")
        self._regions = np.frombuffer(memory, np.uint8).reshape(self.size, SLOTS, -1)
        self._slot_bytes = self._regions.shape[-1]
        self._turns = 0
        self._turn_of_other = bytearray(_TURN.size)

    def all_gather(self, parts: Sequence[np.ndarray], out: Sequence[np.ndarray], *, key: int) -> None:
        """Writes to `out`, for each of `parts`, the members' arrays, of one shape, concatenated along axis 0, in one collective.

        The parts are of one dtype. `key` is the same for all members, here and below.
        """
        mine, gathered = [bytes_of(x) for x in parts], [bytes_of(x).reshape(self.size, -1) for x in out]
        for turn in _turns([x.size for x in mine], self._slot_bytes):
            slots = self._turn(key, [(span.offset, mine[span.part][span.here]) for span in turn])
            for other in self._others:
                for span in turn:
                    gathered[span.part][other, span.here] = slots[other, span.there]
        for x, row in zip(gathered, mine, strict=True):
            x[self.place] = row

    def broadcast(self, parts: Sequence[np.ndarray], out: Sequence[np.ndarray], *, key: int, source: int) -> None:
        """Writes one array of member `source`, who gives it and gets none, to the `out` of all others, who give none."""
        [x] = parts or out
        whole = bytes_of(x)
        for start in range(0, whole.size, self._slot_bytes):
            here = whole[start : start + self._slot_bytes]
            slots = self._turn(key, [(0, here)] if self.place == source else [])
            if self.place != source:
                here[...] = slots[source, : here.size]

    def all_to_all(self, parts: Sequence[np.ndarray], out: Sequence[np.ndarray], *, key: int) -> None:
        """Of one array: sends `x[i]` to member i, and writes to `out` what each has sent here: (N, ...) to (N, ...)."""
        mine, received = (bytes_of(x).reshape(self.size, -1) for x in (*parts, *out))
        for turn in _turns([mine.shape[1]], self._slot_bytes // self.size):
            width = turn[-1].end
            slots = self._turn(key, self._rows(turn, [mine], width))
            for other in self._others:
                for span in turn:
                    received[other, span.here] = slots[other, self.place * width + span.offset :][: span.size]
        received[self.place] = mine[self.place]

    def reduce_scatter(self, parts: Sequence[np.ndarray], out: Sequence[np.ndarray], *, key: int) -> None:
        """Writes to `out`, for each of `parts`, the sum of the members' `part[place]`, in one collective: (N, ...) to (...).

        The parts are of one dtype; sums are taken in that of `out`.
        """
        mine, totals = [x.reshape(self.size, -1) for x in parts], [x.reshape(-1) for x in out]
        for turn in _turns([x.size for x in totals], self._slot_bytes // (self.size * parts[0].itemsize)):
            width = turn[-1].end
            slots = self._turn(key, self._rows(turn, mine, width))
            for span in turn:
                own = mine[span.part][self.place, span.here]
                self._reduce(slots, self.place * width + span.offset, own, totals[span.part][span.here])

    def _rows(self, turn: Sequence[_Span], parts: Sequence[np.ndarray], width: int) -> list[tuple[int, np.ndarray]]:
        """Returns where in the slot the others' rows of `parts` go: `width` elements for each member."""
        places = [(other, span, (other * width + span.offset) * parts[0].itemsize) for other in self._others for span in turn]
        return [(place, parts[span.part][other, span.here]) for other, span, place in places]

    def all_reduce(
        self, parts: Sequence[np.ndarray], out: Sequence[np.ndarray], *, key: int, reduce_op: str = "sum", dtype: Any = None
    ) -> None:
        """Of one array: `out` is the members' arrays, reduced elementwise ("sum", "max", "min") in `dtype` (None: theirs)."""
        mine, total = (x.reshape(-1) for x in (*parts, *out))
        step = self._slot_bytes // mine.dtype.itemsize
        for start in range(0, mine.size, step):
            part, reduced = mine[start : start + step], total[start : start + step]
            slots = self._turn(key, [(0, part)])
            if part.nbytes <= _DIRECT_BYTES:
                self._reduce(slots, 0, part, reduced, reduce_op, dtype)
                continue
            width = -(-part.size // self.size)
            of_member = [slice(member * width, (member + 1) * width) for member in range(self.size)]
            own = of_member[self.place]
            self._reduce(slots, own.start, part[own], reduced[own], reduce_op, dtype)
            slots = self._turn(key, [(0, reduced[own])])
            for other in self._others:
                theirs = reduced[of_member[other]]
                theirs[...] = _typed(slots[other], mine.dtype, 0, theirs.size)

    def _reduce(
        self, slots: np.ndarray, begin: int, own: np.ndarray, total: np.ndarray, reduce_op: str = "sum", dtype: Any = None
    ) -> None:
        """Writes the reduction, in `dtype` (None: that of `total`), of all members' elements from `begin` on, here `own`."""
        reduce, parts = _REDUCE[reduce_op], [_typed(slot, own.dtype, begin, own.size) for slot in slots]
        parts[self.place] = own
        found = total if dtype is None or dtype == total.dtype else np.empty(total.shape, dtype)
        reduce(parts[0], parts[1], out=found, dtype=found.dtype, casting="same_kind")
        for part in parts[2:]:
            reduce(found, part, out=found, dtype=found.dtype, casting="same_kind")
        if found is not total:
            total[...] = found

    def _turn(self, key: int, mine: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
        """Writes vectors of `mine` at offsets of this member's slot; returns all slots (N, bytes) when everybody has written."""
        slots = self._regions[:, self._turns % SLOTS]
        self._turns += 1
        for offset, vector in mine:
            slots[self.place, offset : offset + vector.nbytes].view(vector.dtype)[...] = vector
        turn = _TURN.pack(key, self._turns)
        for other in self._others:
            self.peers.send(other, turn)
        for other in self._others:
            self.peers.receive_into(other, self._turn_of_other)
            if self._turn_of_other != turn:
                here, there = _TURN.unpack(turn), _TURN.unpack(self._turn_of_other)
                raise PeerLost(
                    f"members of the group are at different collectives, {here} here and {there} at member {other}: what one "
                    "worker does, all must do; look for a callback, or other code, that only one runs"
                )
        return slots


_TURN = struct.Struct("<qq")  # key, number


@dataclasses.dataclass(frozen=True)
class _Span:
    """Elements [start, start + size) of one of several vectors, and where they stand in a turn."""

    part: int
    start: int
    size: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.size

    @property
    def here(self) -> slice:
        return slice(self.start, self.start + self.size)

    @property
    def there(self) -> slice:
        return slice(self.offset, self.end)


def _turns(sizes: Sequence[int], most: int) -> Iterator[list[_Span]]:
    """Cuts vectors of `sizes`, one behind the other, in turns of `most` elements."""
    turn: list[_Span] = []
    for part, size in enumerate(sizes):
        start = 0
        while start < size:
            offset = turn[-1].end if turn else 0
            turn.append(_Span(part, start, min(size - start, most - offset), offset))
            start += turn[-1].size
            if turn[-1].end == most:
                yield turn
                turn = []
    if turn:
        yield turn


def _typed(slot: np.ndarray, dtype: Any, begin: int, count: int) -> np.ndarray:
    return slot[begin * dtype.itemsize : (begin + count) * dtype.itemsize].view(dtype)
