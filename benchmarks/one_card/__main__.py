"""Everything that tfdist does, on one card split in logical GPUs: one command, under eight minutes, to be sent back.

    python -m benchmarks.one_card                             one card
    python -m benchmarks.one_card --device cpu                without one, in small
    python -m benchmarks.one_card --parts exact memory        some of the parts

Parts, in order of worth:

    exact      losses and weights of each technique against one logical device
    memory     the allocator's peak at each ZeRO stage, against the closed formula
    cost       a strategy of one rank beside plain Keras, and PyTorch's beside plain PyTorch where it can be imported
    overlap    where the time of a step goes on two logical devices
    plans      what a plan says of memory and time beside what a model takes: only where it is asked for

A part that runs alone may take all of the time.

Rows run in processes beside this one. One that fails, crashes or hangs is a row with its error, and the next goes on. DIR gets
results.jsonl, a line for each row as it ends, behind a line that says what machine it is, and table.txt, written anew after each
row: whatever cuts the program short, what was found is there. The exit code is 0 only where every row holds or was left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when TensorFlow is imported

from benchmarks import cases, peers
from benchmarks.one_card import cost, exact, memory, overlap, plans
from benchmarks.one_card.card import Card
from benchmarks.one_card.machine import machine_row
from benchmarks.one_card.rows import Part, run_part
from tfdist.tools.doctor.check import Result, Status

PARTS: dict[str, Callable[[Card], Part]] = {
    "exact": exact.part,
    "memory": memory.part,
    "cost": cost.part,
    "overlap": overlap.part,
    "plans": plans.part,
}
_DEFAULT = [name for name in PARTS if name != "plans"]
_SECONDS = 460.0  # for all parts of a card; importing TensorFlow comes on top
FILE, TABLE = "results.jsonl", "table.txt"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device_help = "what is split: the first GPU, or the CPU in its place, with smaller models (default: gpu)"
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help=device_help)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=_DEFAULT, help=f"default: {' '.join(_DEFAULT)}")
    parser.add_argument("--quick", action="store_true", help="few rows, tiny models: whether the program runs")
    out = pathlib.Path("out/one_card")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", default=out, help=f"default: {out}")
    peers.add_torch_arguments(parser)
    args = parser.parse_args(argv)
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"argument --out: must be a folder. Received: {args.out}")
    return args


class Book:
    """What was found, on disk as it comes.

    Args:
        folder: gets the files; those of a run before are replaced.
    """

    def __init__(self, folder: pathlib.Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._lines, self._table = folder / FILE, folder / TABLE
        self._lines.write_text("")
        self._head, self._began = "", time.monotonic()
        self._found: dict[str, tuple[Part, list[Result]]] = {}

    def begin(self, fields: dict[str, Any], line: str) -> None:
        cases.emit(fields, self._lines)
        self._head = line

    def add(self, part: Part, result: Result) -> None:
        _, before = self._found.setdefault(part.name, (part, []))
        before.append(part.relate(result, before))
        found = before[-1]
        cases.emit({"part": part.name, **found.to_json()}, self._lines)
        self._table.write_text(self.text())
        cases.progress(f"{time.monotonic() - self._began:4.0f} s  {part.name}: {found.name}: {found.status}: {found.summary}")

    def text(self) -> str:
        """Returns the tables of all parts so far."""
        return "\n\n".join([self._head, *(_table(part, results) for part, results in self._found.values())]) + "\n"

    @property
    def holds(self) -> bool:
        return not any(result.status.is_bad for _, results in self._found.values() for result in results)


def _table(part: Part, results: Sequence[Result]) -> str:
    rows = [
        [one.name, one.status.value, *(cell(one.data) for cell in part.columns.values()), f"{one.seconds:.0f}"] for one in results
    ]
    notes = [f"{one.name}: {one.status.value}: {one.summary}" for one in results if one.status is not Status.HOLDS]
    return "\n".join([f"{part.name}: {part.text}", "", cases.table([part.name, "", *part.columns, "s"], rows), *notes])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    args.torch = peers.version_in(args.torch_python, "torch") if "cost" in args.parts and not args.quick else None
    card = Card(args.device == "gpu", args.quick)
    stop = time.monotonic() + card.patience * _SECONDS
    book = Book(args.out)
    machine = machine_row(card)
    fields = {"benchmark": "one_card", "device": args.device, "quick": args.quick, "torch": args.torch, **machine.to_json()}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    book.begin({**fields, **cases.machine_fields(), "began": now}, f"{machine.summary}\n{now}, {cases.command_line()}")
    if machine.status.is_bad:
        print(f"{machine.summary}\nWithout a GPU: --device cpu", file=sys.stderr)
        return 1
    for name in args.parts:
        part = PARTS[name](card)
        if len(args.parts) == 1:
            part = dataclasses.replace(part, seconds=_SECONDS)
        run_part(part, card, args, lambda result, part=part: book.add(part, result), stop)
    print("\n" + book.text())
    print("\n".join(str(args.out / name) for name in (FILE, TABLE)))
    return 0 if book.holds else 1


if __name__ == "__main__":
    sys.exit(main())
