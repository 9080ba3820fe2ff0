"""The null GPU itself: what it moves, and that it finds what would hang."""

import re

from tests.null_gpu.checks import circle
from tests.null_gpu.log import Log, Record
from tests.null_gpu.running import Machine


def test_what_is_moved(null_gpus):
    ended = null_gpus(Machine(3), ["-m", "tests.null_gpu.raw_calls", "moves"], seconds=60)
    assert ended.codes == [0], ended.outputs
    gathered = [0.0, 10.0, 20.0, 1.0, 11.0, 21.0, 2.0, 12.0, 22.0]
    exchanged = [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0], [20.0, 21.0, 22.0]]
    expected = [f"{gathered} {[1.0, 11.0, 21.0]} {mine}" for mine in exchanged]
    assert ended.outputs[0].splitlines() == expected
    calls = ended.log.calls()
    assert {(call.op, call.bytes, call.dtype, call.size) for call in calls} == {
        ("AllGather", 12, "float32", 3),
        ("Broadcast", 12, "float32", 3),
        ("AllToAll", 12, "float32", 3),
    }
    assert all(call.record.queued <= call.record.began <= call.met <= call.record.ended for call in calls)
    assert {copy.bytes for copy in ended.log.copies("HtoD")} == {12, 36} and not ended.log.copies("peer")


def test_communicators_in_different_orders_are_a_deadlock(null_gpus):
    """Each device holds the kernel that it runs: NCCL's classic deadlock. Both sides say for whom they wait."""
    ended = null_gpus(Machine(2, timeout_seconds=1), ["-m", "tests.null_gpu.raw_calls", "crossed"], seconds=60)
    assert ended.codes == [87]
    found = [re.fullmatch(r"Deadlock: rank (\d) of 2 of communicator \S+ waits in AllReduce of (\d) .*\[(\d)\]\.", error)
             for error in ended.log.errors()]  # fmt: skip
    assert sorted(match.groups() for match in found) == [("0", "2", "1"), ("1", "3", "0")]


def test_ranks_that_differ_are_an_error(null_gpus):
    ended = null_gpus(Machine(2), ["-m", "tests.null_gpu.raw_calls", "different"], seconds=60)
    assert ended.codes == [87]
    assert any("rank 0 runs AllReduce of 3 float32, sum, rank 1 runs AllReduce of 4 float32, sum." in error
               for error in ended.log.errors())  # fmt: skip


def test_a_circle_of_calls_is_found():
    """In the log of what did not hang, because some device happened to be late."""
    assert circle(_log([("a", 0), ("b", 0), ("a", 1)], [("a", 0), ("b", 0), ("a", 1)])) == []
    assert circle(_log([("a", 0), ("b", 0)], [("b", 0), ("a", 0)])) == ["a 0", "b 0"]
    # Of three devices, of which no two disagree.
    assert circle(_log([("a", 0), ("b", 0)], [("b", 0), ("c", 0)], [("c", 0), ("a", 0)])) == ["a 0", "b 0", "c 0"]


def _log(*devices):
    """Returns the log of devices that have called operations of communicators in these orders."""
    return Log(
        Record(
            "nccl",
            1,
            device,
            0,
            place,
            place,
            place,
            ("AllReduce", name, "0", "2", str(number), "4", "float32", "sum", "0", "0", "0.0"),
        )
        for device, calls in enumerate(devices)
        for place, (name, number) in enumerate(calls)
    )
