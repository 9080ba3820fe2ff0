"""The report of an examination: text for people, JSON for machines."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdist.tables import size_text, table_lines
from tfdist.tools.doctor.advice import Seen, advice
from tfdist.tools.doctor.check import Outcome, Status

_LAST_LINES = 6


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings of all workers."""

    outcomes: tuple[Outcome, ...]  # of the checks, in order
    started: str  # when, as ISO 8601 in UTC
    seconds: float  # how long it took
    command: tuple[str, ...] = ()  # the arguments

    @property
    def holds(self) -> bool:
        """Whether no check has failed."""
        return not any(outcome.status.is_bad for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as what JSON can carry."""
        link = Seen(self.outcomes).link()
        return {
            "format": 1,
            "holds": self.holds,
            "started": self.started,
            "seconds": round(self.seconds, 1),
            "command": list(self.command),
            "link": dataclasses.asdict(link),
            "checks": [outcome.to_json() for outcome in self.outcomes],
            "advice": advice(self.outcomes),
        }

    def __str__(self) -> str:
        seen = Seen(self.outcomes)
        parts = [
            ["tfdist doctor " + " ".join([*self.command, f"({self.started}, {self.seconds:.0f} s)"])],
            _versions(seen),
            _devices(seen),
            _bandwidth(seen),
            _lines(self.outcomes, "parity", "The same numbers as on one device"),
            _lines(self.outcomes, "memory", "Memory"),
            self._troubles(),
            ["What to change", *(f"  * {text}" for text in advice(self.outcomes))],
            [self._verdict()],
        ]
        return "\n\n".join("\n".join(part) for part in parts if len(part) > 1 or part in (parts[0], parts[-1]))

    def _troubles(self) -> list[str]:
        lines = ["What went wrong"]
        for outcome in self.outcomes:
            if outcome.status.is_bad:
                lines.append(f"  {outcome.name} {outcome.status}: {outcome.summary}")
                for result in outcome.results:
                    lines += [f"    | {line}" for line in _telling(result.log)]
        return lines

    def _verdict(self) -> str:
        counts = {status: sum(outcome.status is status for outcome in self.outcomes) for status in Status}
        words = {Status.HOLDS: "hold", Status.FAILS: "fail", Status.ERROR: "with an error", Status.LEFT_OUT: "left out"}
        told = ", ".join(f"{count} {words[status]}" for status, count in counts.items() if count)
        return f"{'All holds' if self.holds else 'Not all holds'}; of {len(self.outcomes)} checks: {told}."


def _telling(log: Sequence[str]) -> Sequence[str]:
    """Returns the last lines, or those before Python's account of its threads, which a crash adds."""
    end = next((number for number, line in enumerate(log) if line.startswith("Fatal Python error")), len(log))
    return [line for line in log[:end] if line.strip("^~ ")][-_LAST_LINES:]


def _versions(seen: Seen) -> list[str]:
    versions = [f"  {name}: {version}" for name, version in seen.first("versions").get("versions", {}).items() if version]
    return ["Versions", *versions, *(f"  {name}={value}" for name, value in seen.environment().items())]


def _devices(seen: Seen) -> list[str]:
    devices, cards = seen.devices(), {card.uuid: card.memory_bytes for card in seen.topology().cards}
    if not devices:
        return []
    rows = [["  rank", "host", "device", "card", "memory", "compute capability"]]
    for device in devices:
        memory = device["memory_bytes"] or cards.get(device["uuid"])
        cells = [device["host"], device["device"], device["card"] or "-", size_text(memory) if memory else "unknown"]
        rows.append([f"  {device['rank']}", *cells, device["compute_capability"] or "-"])
    link, chief = seen.link(), seen.first("devices")
    said = f", said to move {link.gb_per_second:.4g} GB/s in a direction" if link.gb_per_second else ""
    lines = ["Devices", *table_lines(rows, "<<<<><"), f"  link: {link.words}{said}"]
    lines += [f"  unknown: {text}" for text in seen.topology().unknown]
    return [*lines, f"  transport: {chief['transport']}, because {chief['reason']}"]


def _bandwidth(seen: Seen) -> list[str]:
    outcomes = [outcome for outcome in seen.outcomes.values() if outcome.name.startswith("bandwidth/")]
    rows = [["  collective", "bytes", "microseconds", "algorithm GB/s", "bus GB/s", "of the link"]]
    nominal = seen.link().gb_per_second
    for outcome in outcomes:
        name = outcome.name.partition("/")[2]
        for row in outcome.chief.data.get("sizes", ()):
            speeds = [row["algorithm_gb_per_second"], row["bus_gb_per_second"]]
            share = f"{speeds[1] / nominal:.0%}" if nominal else "-"
            cells = [f"{row['bytes']:,}", f"{1e6 * row['seconds']:,.0f}", *(f"{speed:.3g}" for speed in speeds), share]
            rows.append([f"  {name}", *cells])
    lines = ["Bandwidth, in the terms of nccl-tests"]
    lines += table_lines(rows, "<>>>>>") if len(rows) > 1 else []
    lines += [f"  {outcome.name} {outcome.status}: {outcome.summary}" for outcome in outcomes if not outcome.chief.data]
    return lines


def _lines(outcomes: Sequence[Outcome], part: str, title: str) -> list[str]:
    found = [outcome for outcome in outcomes if outcome.name.startswith(f"{part}/")]
    return [title, *(f"  {one.name.partition('/')[2]:18} {one.status:9} {one.summary}" for one in found)]
