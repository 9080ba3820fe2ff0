"""Memory that is given away while a message still reads or writes it: what a log of null GPUs shows of it.

Products and messages say which memory they read and write. A message reads its input and writes its output from the moment when
all ranks have come until it is over; TensorFlow's allocator gives memory away when the host has queued what needs it.
"""

from __future__ import annotations

import dataclasses
import math

from tests.null_gpu.log import Call, Log, Record

Range = tuple[int, int]  # from an address to another


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product: what it reads and what it writes."""

    record: Record
    read: tuple[Range, ...]
    written: Range


def products(log: Log) -> list[Product]:
    found = []
    for record in log.of_kind("product"):
        ranges = [_range(place, size) for place, size in zip(record.fields[1::2], record.fields[2::2], strict=True)]
        if ranges:
            found.append(Product(record, tuple(ranges[:-1]), ranges[-1]))
    return found


def output_of(call: Call) -> Range:
    factors = {"AllGather": call.size, "ReduceScatter": 1 / call.size}
    return (call.written, call.written + int(call.bytes * factors.get(call.op, 1)))


def hazards(log: Log) -> list[str]:
    """Returns where a product and a message of one device touch the same memory at once, or in the wrong order; in words."""
    found = []
    for call in log.calls():
        sent, received = (call.read, call.read + call.bytes), output_of(call)
        for product in products(log):
            if (product.record.process, product.record.device) != (call.record.process, call.record.device):
                continue
            is_later = product.record.queued > call.record.queued
            is_at_once = product.record.began < call.record.ended and product.record.ended > call.met
            touched = (*product.read, product.written)
            if is_at_once and is_later and _meet(product.written, sent):
                found.append(f"a product writes what {_words(call)} still reads")
            if is_at_once and any(_meet(one, received) for one in touched):
                found.append(f"{_words(call)} writes what {'a later' if is_later else 'an earlier'} product uses")
            if is_later and product.record.began < call.met and any(_meet(one, received) for one in touched):
                found.append(f"a product uses what {_words(call)} has not written yet")
    return found


def reused(log: Log) -> int:
    """Returns how many messages read memory that a later product was given to write: where a hazard could be."""
    return sum(
        any(
            _meet(product.written, (call.read, call.read + call.bytes))
            and product.record.queued > call.record.queued
            and product.record.device == call.record.device
            for product in products(log)
        )
        for call in log.calls()
    )


def most_gathered(log: Log, device: int) -> int:
    """Returns how many gathered tensors a device holds at the most, from when the host asks for one until it has queued its last
    reader, after which TensorFlow's allocator may give the memory to another, or a part of it to what a product computes.

    Each is one layer's weights: products read them whole.
    """
    gathers = [call for call in log.calls() if call.op == "AllGather" and call.bytes > 1024 and call.record.device == device]
    gathers.sort(key=lambda call: call.record.queued)
    spans = []
    for number, call in enumerate(gathers):
        again = [other.record.queued for other in gathers[number + 1 :] if _meet(output_of(other), output_of(call))]
        readers = [
            product.record.queued
            for product in products(log)
            if product.record.device == device
            and call.record.queued < product.record.queued < min(again, default=math.inf)
            and output_of(call) in product.read
        ]
        spans.append((call.record.queued, max(readers)))
    return max(sum(begin <= at <= end for begin, end in spans) for at, _ in spans)


def _range(place: str, size: str) -> Range:
    begin = int(place, 16)
    return begin, begin + int(size)


def _meet(one: Range, other: Range) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _words(call: Call) -> str:
    return f"{call.op} {call.number} of {call.bytes} bytes on device {call.record.device}"
