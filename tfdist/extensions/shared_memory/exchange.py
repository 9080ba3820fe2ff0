"""Collectives of processes on one machine through memory that they share. No TensorFlow here.

Each member of a group has memory of two slots, which only it writes and the others map, and a socket to every other member. A
collective is a number of turns:

    member 0   write own slot | tell the others | wait for all of them | read their slots
    member 1   write own slot | tell the others | wait for all of them | read their slots

so that every byte is copied once into such memory and once out of it; sums are taken as it is read. Turns use the two slots one
after the other. Who has heard of turn t + 1 from everybody knows that everybody has read the slots of turn t, and may write them.

Tensors larger than a slot take several turns. Sums are taken in group order, so that all members hold equal bits.
"""

import mmap
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdist.extensions.shared_memory.peers import PeerLost, Peers

SLOTS = 2
_SLOT_BYTES = 2 * 2**20
_LEAST_SLOT_BYTES = 2**20
# All memory of a group counts as that of each member. Two have the larger slots, four the smaller.
_GROUP_BYTES = 8 * 2**20
# Of a large group the slots are smaller still.
_MOST_GROUP_BYTES = 32 * 2**20
_SMALLEST_SLOT_BYTES = 64 * 2**10
# Up to so many bytes every member adds up everything; beyond, each adds up its part, and the sums are gathered.
_DIRECT_BYTES = 64 * 2**10
# A slot begins and ends at multiples of this, of whichever dtype.
_ALIGNMENT = 64
_REDUCE: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def slot_bytes(size: int) -> int:
    """Returns the size of a slot of a group of `size` members, a multiple of 64."""
    wanted = min(_SLOT_BYTES, max(_LEAST_SLOT_BYTES, _GROUP_BYTES // (size * SLOTS)))
    fitting = min(wanted, _MOST_GROUP_BYTES // (size * SLOTS))
    return max(_SMALLEST_SLOT_BYTES, fitting // _ALIGNMENT * _ALIGNMENT)


class Exchange:
    """One member's part of what a group on one machine shares.

    Its methods are called by all members in the same order, one at a time. It stands at `place` in the group; `memories` are
    the members', mapped, of `SLOTS * slot_bytes(size)` bytes, and `peers` are connected sockets to all others, by their places.
    """

    def __init__(self, memories: Sequence[mmap.mmap], place: int, peers: Mapping[int, socket.socket]):
        self.size = len(memories)
        self.place = place
        # Others first that come next: not all members read the same memory at once.
        self._others = [(place + step) % self.size for step in range(1, self.size)]
        self.peers = Peers(peers, "member")
        self._regions = [np.frombuffer(memory, np.uint8).reshape(SLOTS, -1) for memory in memories]
        self._slot_bytes = self._regions[place].shape[1]
        self._turns = 0
        self._turn_of_other = bytearray(_TURN.size)

    def all_gather(self, parts: Sequence[np.ndarray], out: Sequence[np.ndarray], *, key: int) -> None:
        """Writes to `out`, for each of `parts`, the members' arrays, of one shape, concatenated along axis 0, in one collective.

        The parts are of one dtype. `key` is the same for all members, here and below.
        """
        self._collect([x.reshape(1, -1) for x in parts], out, key)

    def all_to_all(self, parts: Sequence[np.ndarray], out: Sequence[np.ndarray], *, key: int) -> None:
        """Of one array: sends `x[i]` to member i, and writes to `out` what each has sent here: (N, ...) to (N, ...)."""
        self._collect([x.reshape(self.size, -1) for x in parts], out, key)

    def _collect(self, parts: Sequence[np.ndarray], out: Sequence[np.ndarray], key: int) -> None:
        found = [x.reshape(self.size, -1) for x in out]
        for span, pieces in self._pieces(parts, key):
            for member in (*self._others, self.place):
                found[span.part][member, span.here] = pieces[member]

    def broadcast(self, parts: Sequence[np.ndarray], out: Sequence[np.ndarray], *, key: int, source: int) -> None:
        """Writes one array of member `source`, who gives it and gets none, to the `out` of all others, who give none."""
        [x] = (x.reshape(1, -1) for x in parts or out)
        for span, pieces in self._pieces([x], key, source):
            if self.place != source:
                x[0, span.here] = pieces[source]

    def reduce_scatter(self, parts: Sequence[np.ndarray], out: Sequence[np.ndarray], *, key: int) -> None:
        """Writes to `out`, for each of `parts`, the sum of the members' `part[place]`, in one collective: (N, ...) to (...).

        The parts are of one dtype; sums are taken in that of `out`.
        """
        totals = [x.reshape(-1) for x in out]
        for span, pieces in self._pieces([x.reshape(self.size, -1) for x in parts], key):
            _reduce(pieces, totals[span.part][span.here])

    def all_reduce(
        self, parts: Sequence[np.ndarray], out: Sequence[np.ndarray], *, key: int, reduce_op: str = "sum", dtype: Any = None
    ) -> None:
        """Of one array: `out` is the members' arrays, reduced elementwise ("sum", "max", "min") in `dtype` (None: theirs)."""
        [total] = (x.reshape(-1) for x in out)
        for span, pieces in self._pieces([x.reshape(1, -1) for x in parts], key):
            reduced = total[span.here]
            if reduced.nbytes <= _DIRECT_BYTES:
                _reduce(pieces, reduced, reduce_op, dtype)
                continue
            width = -(-reduced.size // self.size)
            of_member = [slice(member * width, (member + 1) * width) for member in range(self.size)]
            own = of_member[self.place]
            _reduce([piece[own] for piece in pieces], reduced[own], reduce_op, dtype)
            slots = self._turn(key, reduced.dtype, [(0, reduced[own])])
            for other in self._others:
                theirs = reduced[of_member[other]]
                theirs[...] = slots[other][: theirs.size]

    def _pieces(
        self, parts: Sequence[np.ndarray], key: int, source: int | None = None
    ) -> "Iterator[tuple[_Span, list[np.ndarray]]]":
        """Moves `parts` of one dtype in turns; yields for each span of them what the members have for this one there.

        A part has one row, which is for all members, or one for each. With a `source` only that member's are moved. What is
        yielded is to be read before the next turn.
        """
        rows, dtype = len(parts[0]), parts[0].dtype
        own, receivers = (self.place, self._others) if rows > 1 else (0, [0])
        for turn, width in _turns([x.shape[1] for x in parts], self._slot_bytes // (rows * dtype.itemsize)):
            mine = [(row * width + span.offset, parts[span.part][row, span.here]) for row in receivers for span in turn]
            slots = self._turn(key, dtype, mine if source in (None, self.place) else [])
            for span in turn:
                piece, begin = parts[span.part][own, span.here], own * width + span.offset
                pieces = [slot[begin : begin + piece.size] for slot in slots]
                pieces[self.place] = piece
                yield span, pieces

    def _turn(self, key: int, dtype: Any, mine: Sequence[tuple[int, np.ndarray]]) -> list[np.ndarray]:
        """Writes vectors of `mine` at places of this member's slot; returns the members' slots when everybody has written."""
        slots = [region[self._turns % SLOTS].view(dtype) for region in self._regions]
        self._turns += 1
        for place, vector in mine:
            slots[self.place][place : place + vector.size] = vector
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


class _Span(NamedTuple):
    """The elements `here` of one of several vectors, and where they begin in a turn."""

    part: int
    here: slice
    offset: int


def _turns(sizes: Sequence[int], most: int) -> "Iterator[tuple[list[_Span], int]]":
    """Cuts consecutive vectors of `sizes` in turns of `most` elements; yields how many each has, too."""
    turn: list[_Span] = []
    filled = 0
    for part, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(size, start + most - filled)
            turn.append(_Span(part, slice(start, end), filled))
            filled += end - start
            start = end
            if filled == most:
                yield turn, filled
                turn, filled = [], 0
    if turn:
        yield turn, filled


def _reduce(pieces: Sequence[np.ndarray], total: np.ndarray, reduce_op: str = "sum", dtype: Any = None) -> None:
    """Writes the reduction of `pieces`, in order and in `dtype` (None: that of `total`), to `total`."""
    reduce, first, *rest = _REDUCE[reduce_op], *pieces
    found = total if dtype is None or dtype == total.dtype else np.empty(total.shape, dtype)
    for piece in rest:
        reduce(first, piece, out=found, dtype=found.dtype, casting="same_kind")
        first = found
    if found is not total:
        total[...] = found
