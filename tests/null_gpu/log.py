"""What null GPUs have done, from the logs of the processes that had them: see native/null_gpu.h.

A line has seven fields and more, separated by tabs: kind, device, stream, when it was queued, began and ended (microseconds of
one clock of the machine), and what it was.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Record:
    """One thing that a device did, or that was noted.

    Attributes:
        kind: "kernel", "product", "copy", "nccl", "allocate", "communicator", "note", "unknown" or "error".
        process: the process that had the device.
        device: the device's number in its process; -1: none.
        stream: the number of the stream; -1: none.
        queued, began, ended: microseconds.
        fields: what it was.
    """

    kind: str
    process: int
    device: int
    stream: int
    queued: float
    began: float
    ended: float
    fields: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.fields[0]


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy: "HtoD", "DtoH", "DtoD" within a device, or "peer" between two."""

    record: Record
    direction: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Call:
    """One rank's part of a collective that has run.

    Attributes:
        op: "AllReduce", "AllGather", "ReduceScatter", "Broadcast" or "AllToAll".
        communicator: its name.
        rank, size: the rank in the communicator, and how many there are.
        number: the how manieth operation of the communicator it is.
        bytes: of the rank's input; of a broadcast, of what the root has.
        dtype: NCCL's, in NumPy's words.
        detail: of a reduction its kind; of a broadcast "root 0".
        read, written: addresses of input and output; 0: none.
        met: when all ranks had come.
    """

    record: Record
    op: str
    communicator: str
    rank: int
    size: int
    number: int
    bytes: int
    dtype: str
    detail: str
    read: int
    written: int
    met: float


class Log:
    """The records of some processes, in the order of their beginnings."""

    def __init__(self, records: Iterable[Record]):
        self.records = sorted(records, key=lambda record: record.began)

    @classmethod
    def read(cls, folder: pathlib.Path) -> Log:
        return cls(record for path in folder.glob("log.*") for record in _read(path))

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record.kind == kind]

    def of_process(self, process: int) -> Log:
        return Log(record for record in self.records if record.process == process)

    def between(self, begin: str, end: str) -> Log:
        """Returns what was queued between two notes, of a log of one process."""
        notes = {record.name: record.began for record in self.of_kind("note")}
        return Log(record for record in self.records if notes[begin] <= record.queued <= notes[end])

    def copies(self, *directions: str) -> list[Copy]:
        found = [Copy(record, record.fields[0], int(record.fields[1])) for record in self.of_kind("copy")]
        return [copy for copy in found if not directions or copy.direction in directions]

    def calls(self) -> list[Call]:
        return [_call(record) for record in self.of_kind("nccl")]

    def members(self) -> dict[str, list[tuple[int, int]]]:
        """Returns, per communicator, the (process, device) of each of its ranks."""
        found: dict[str, dict[int, tuple[int, int]]] = {}
        for record in self.of_kind("communicator"):
            name, rank, _ = record.fields
            found.setdefault(name, {})[int(rank)] = (record.process, record.device)
        return {name: [ranks[rank] for rank in sorted(ranks)] for name, ranks in found.items()}

    def errors(self) -> list[str]:
        return [record.name for record in self.of_kind("error")]


def _read(path: pathlib.Path) -> Iterable[Record]:
    process = int(path.name.partition(".")[2])
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        kind, device, stream, queued, began, ended, *fields = line.split("\t")
        yield Record(kind, process, int(device), int(stream), float(queued), float(began), float(ended), tuple(fields))


def _call(record: Record) -> Call:
    op, communicator, rank, size, number, size_bytes, dtype, detail, read, written, met = record.fields
    numbers = int(rank), int(size), int(number), int(size_bytes)
    return Call(record, op, communicator, *numbers, dtype, detail, _address(read), _address(written), float(met))


def _address(text: str) -> int:
    return 0 if text == "(nil)" else int(text, 16)
