"""Collectives through shared memory, between threads that stand for processes."""

import mmap
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from tfdist.extensions.shared_memory.exchange import SLOTS, Exchange, slot_bytes
from tfdist.extensions.shared_memory.peers import PeerLost

SLOT_BYTES = 256  # so that small arrays take several turns


def group(size, slot_bytes=SLOT_BYTES):
    memories = [mmap.mmap(-1, SLOTS * slot_bytes) for _ in range(size)]
    peers = [{} for _ in range(size)]
    for one in range(size):
        for other in range(one):
            peers[one][other], peers[other][one] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [Exchange(memories, place, peers[place]) for place in range(size)]


def together(members, call):
    """Returns what `call(exchange, place)` returns at every member."""
    with ThreadPoolExecutor(len(members)) as pool:
        futures = [pool.submit(call, member, place) for place, member in enumerate(members)]
        return [future.result(20) for future in futures]


def all_gather(exchange, *parts, key):
    out = [np.empty((exchange.size * x.shape[0], *x.shape[1:]), x.dtype) for x in parts]
    exchange.all_gather(parts, out, key=key)
    return out


def reduce_scatter(exchange, *parts, key, dtype=None):
    out = [np.empty(x.shape[1:], dtype or x.dtype) for x in parts]
    exchange.reduce_scatter(parts, out, key=key)
    return out


def all_reduce(exchange, x, key, **options):
    out = np.empty_like(x)
    exchange.all_reduce([x], [out], key=key, **options)
    return out


def all_to_all(exchange, x, key):
    out = np.empty_like(x)
    exchange.all_to_all([x], [out], key=key)
    return out


def broadcast(exchange, x, key, source):
    out = np.empty_like(x)
    exchange.broadcast(*(([x], []) if exchange.place == source else ([], [out])), key=key, source=source)
    return x if exchange.place == source else out


def values(size, shape, dtype):
    """Small whole numbers, of which all sums are exact."""
    rng = np.random.default_rng(3)
    return [rng.integers(-4, 5, shape).astype(dtype) for _ in range(size)]


DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16, "int32", "int64"]
SHAPES = [(1,), (5,), (7, 3), (64, 3), (301,)]  # of 301 float64 a slot holds a ninth


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_collective(size, dtype):
    members = group(size)
    for number, shape in enumerate(SHAPES):
        mine = values(size, shape, dtype)
        rows = [np.stack(values(size, shape, dtype)) + place for place in range(size)]
        rows = [row.astype(dtype) for row in rows]

        def call(exchange, place, mine=mine, rows=rows, number=number):
            return [
                *all_gather(exchange, mine[place], key=number),
                all_to_all(exchange, rows[place], number),
                *reduce_scatter(exchange, rows[place], key=number, dtype=np.float32 if np.dtype(dtype).itemsize == 2 else None),
                *(broadcast(exchange, mine[place], number, source) for source in (0, size - 1)),
                *(all_reduce(exchange, mine[place], number, reduce_op=op) for op in ("sum", "max", "min")),
            ]

        for place, found in enumerate(together(members, call)):
            total = np.sum([row[place].astype("float64") for row in rows], axis=0)
            expected = [
                np.concatenate(mine),
                np.stack([row[place] for row in rows]),
                total,
                mine[0],
                mine[size - 1],
                np.sum([one.astype("float64") for one in mine], axis=0),
                np.max(mine, axis=0),
                np.min(mine, axis=0),
            ]
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one.astype("float64"), other.astype("float64"))
            summed = np.dtype("float32") if np.dtype(dtype).itemsize == 2 else np.dtype(dtype)
            assert [one.dtype for one in found] == [np.dtype(dtype)] * 2 + [summed] + [np.dtype(dtype)] * 5


@pytest.mark.parametrize("size", [2, 3])
def test_several_parts_in_one_collective(size):
    """A turn may end within a part, and hold several."""
    lengths = (5, 1, 90, 64, 2)
    members = group(size)
    shards = [[np.arange(length, dtype="float32") + 1000 * place for length in lengths] for place in range(size)]
    rows = [[np.stack([shard * (row + 1) for row in range(size)]) for shard in mine] for mine in shards]

    def call(exchange, place):
        return all_gather(exchange, *shards[place], key=1), reduce_scatter(exchange, *rows[place], key=2)

    for place, (gathered, reduced) in enumerate(together(members, call)):
        for number in range(len(lengths)):
            np.testing.assert_array_equal(gathered[number], np.concatenate([mine[number] for mine in shards]))
            np.testing.assert_array_equal(reduced[number], sum(mine[number] for mine in shards) * (place + 1))
    assert members[0]._turns == -(-4 * sum(lengths) // SLOT_BYTES) + -(-sum(lengths) // (SLOT_BYTES // (4 * size)))


def test_all_members_hold_equal_bits_of_a_sum():
    """Also of what is summed in parts by several members, and of what all of them sum."""
    members = group(3, slot_bytes=2**18)
    for length in (1000, 50_001):
        mine = [np.random.default_rng(place).normal(size=length).astype("float32") for place in range(3)]
        found = together(members, lambda exchange, place, mine=mine: all_reduce(exchange, mine[place], 1))
        np.testing.assert_array_equal(found[0], (mine[0] + mine[1]) + mine[2])
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)


def test_half_precision_is_summed_wider():
    """2,048 is where float16 stops counting ones."""
    members = group(4)
    mine = [np.array([2048.0 if place == 0 else 1.0], "float16") for place in range(4)]
    call = lambda exchange, place: all_reduce(exchange, mine[place], 1, dtype=np.float32)  # noqa: E731
    assert [one.item() for one in together(members, call)] == [2052.0] * 4  # 2051, rounded once


def test_a_member_that_has_ended_is_noticed():
    first, second = group(2)
    second.peers.abort("the program is over")
    with pytest.raises(PeerLost, match="member.* has ended"):
        all_gather(first, np.zeros(3), key=1)
    with pytest.raises(PeerLost, match="the program is over"):
        all_gather(second, np.zeros(3), key=1)


def test_who_waits_can_be_told_to_give_up():
    first, _ = group(2)
    timer = threading.Timer(0.3, first.peers.abort, ["worker 7 has died"])
    timer.start()
    with pytest.raises(PeerLost, match="worker 7 has died"):
        all_reduce(first, np.zeros(3), 1)


def test_members_at_different_collectives_are_told():
    def call(exchange, place):
        with pytest.raises(PeerLost, match="different collectives"):
            all_gather(exchange, np.zeros(3), key=place)

    together(group(2), call)


@pytest.mark.parametrize(("size", "mib"), [(2, 8), (3, 8), (4, 8), (8, 16), (17, 32), (64, 32), (512, 64)])
def test_the_memory_of_a_group(size, mib):
    assert slot_bytes(size) % 64 == 0
    assert size * SLOTS * slot_bytes(size) <= mib * 2**20 < size * SLOTS * (slot_bytes(size) + 64)
