"""Which links the GPUs of this machine have, as `nvidia-smi` tells, and what its network interfaces are said to do.

Speeds are those of one direction, in GB/s, as bus bandwidths are.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

# By the generation of PCI Express, of a lane.
_PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_CARD_FIELDS = "index,uuid,name,memory.total,memory.used,driver_version,pcie.link.gen.max,pcie.link.width.max"
_NVIDIA_SMI_SECONDS = 20.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LINK = re.compile(r"NV(\d+)$")

LINKS = {
    "NV": "NVLink",
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, through the CPU",
    "NODE": "PCIe, through the CPU, between its bridges",
    "SYS": "PCIe, and between CPUs",
}


@dataclasses.dataclass(frozen=True)
class Card:
    """One GPU, as `nvidia-smi` lists it, which counts all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says."""

    index: int
    uuid: str
    name: str
    memory_bytes: int | None
    used_bytes: int | None
    driver: str
    pcie_gb_per_second: float | None


@dataclasses.dataclass(frozen=True)
class Topology:
    """The links of one machine.

    Attributes:
        cards: its GPUs.
        links: between two cards, by their indices, the lower first: a word of `nvidia-smi topo -m`, such as "NV12" or "PHB".
        nvlink_gb_per_second: of one NVLink of a card, by its index, where `nvidia-smi nvlink` tells it.
        interfaces: GB/s of the network interfaces that are up, by name.
        unknown: what could not be found out, and why.
    """

    cards: tuple[Card, ...] = ()
    links: dict[tuple[int, int], str] = dataclasses.field(default_factory=dict)
    nvlink_gb_per_second: dict[int, float] = dataclasses.field(default_factory=dict)
    interfaces: dict[str, float] = dataclasses.field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    def link(self, first: str, second: str) -> tuple[str, float | None]:
        """Returns, of two cards by their UUIDs, the word for the link between them ("" if unknown) and its GB/s, if known."""
        cards = {card.uuid: card for card in self.cards}
        if first not in cards or second not in cards:
            return "", None
        a, b = sorted((cards[first], cards[second]), key=lambda card: card.index)
        word = self.links.get((a.index, b.index), "")
        if found := _LINK.match(word):
            speed = self.nvlink_gb_per_second.get(a.index)
            return word, speed and int(found[1]) * speed
        speeds = [card.pcie_gb_per_second for card in (a, b) if card.pcie_gb_per_second]
        return word, min(speeds) if word in LINKS and len(speeds) == 2 else None

    def to_json(self) -> dict[str, Any]:
        """Returns the topology as what JSON can carry."""
        links = [{"cards": list(pair), "link": word} for pair, word in self.links.items()]
        speeds = {str(index): speed for index, speed in self.nvlink_gb_per_second.items()}
        return {**dataclasses.asdict(self), "links": links, "nvlink_gb_per_second": speeds, "unknown": list(self.unknown)}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Topology:
        """Returns the topology that `to_json` has made `found` of."""
        return cls(
            cards=tuple(Card(**card) for card in found["cards"]),
            links={(link["cards"][0], link["cards"][1]): link["link"] for link in found["links"]},
            nvlink_gb_per_second={int(index): speed for index, speed in found["nvlink_gb_per_second"].items()},
            interfaces=found["interfaces"],
            unknown=tuple(found["unknown"]),
        )


def ask_nvidia_smi(*arguments: str) -> str:
    """Returns what `nvidia-smi` prints. Raises OSError where it is not there, hangs, or fails."""
    try:
        ended = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"it did not answer in {_NVIDIA_SMI_SECONDS:g} s") from error
    if ended.returncode:
        lines = (ended.stderr or ended.stdout).strip().splitlines() or [f"exit code {ended.returncode}"]
        raise OSError(lines[-1])
    return ended.stdout


def read_topology(ask: Callable[..., str] = ask_nvidia_smi, system: pathlib.Path = pathlib.Path("/sys/class")) -> Topology:
    """Returns what this machine tells of its links; what it does not tell is in `unknown`."""
    interfaces = _interfaces(system)
    try:
        cards = parse_cards(ask(f"--query-gpu={_CARD_FIELDS}", "--format=csv,noheader,nounits"))
    except FileNotFoundError:
        return Topology(interfaces=interfaces, unknown=("links between GPUs: there is no nvidia-smi here",))
    except (OSError, ValueError) as error:
        return Topology(interfaces=interfaces, unknown=(f"links between GPUs: nvidia-smi failed: {error}",))
    unknown, links, speeds = [], {}, {}
    try:
        links = parse_links(ask("topo", "-m"))
    except (OSError, ValueError) as error:
        unknown.append(f"links between GPUs: nvidia-smi topo -m failed: {error}")
    if any(map(_LINK.match, links.values())):
        try:
            speeds = parse_nvlinks(ask("nvlink", "--status"))
        except (OSError, ValueError) as error:
            unknown.append(f"the speed of NVLinks: nvidia-smi nvlink --status failed: {error}")
    return Topology(tuple(cards), links, speeds, interfaces, tuple(unknown))


def parse_cards(text: str) -> list[Card]:
    """Returns the cards in the CSV that `nvidia-smi --query-gpu` prints."""
    cards = []
    for line in filter(str.strip, text.splitlines()):
        index, uuid, name, total, used, driver, generation, width = (field.strip() for field in line.split(","))
        lane, lanes = _PCIE_LANE.get(_number(generation) or 0), _number(width)
        speed = round(lane * lanes, 2) if lane and lanes else None
        cards.append(Card(int(index), uuid, name, _mebibytes(total), _mebibytes(used), driver, speed))
    return cards


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """Returns the links between GPUs in the table that `nvidia-smi topo -m` prints."""
    lines = [line.split("\t") for line in _COLOURS.sub("", text).splitlines()]
    rows = [[cell.strip() for cell in line] for line in lines]
    header = next((row for row in rows if "GPU0" in row[1:]), None)
    if header is None:
        raise ValueError("there is no row of GPUs in its table")
    links = {}
    for row in rows:
        if row is header or not (own := _gpu(row[0])) and own != 0:
            continue
        for name, word in zip(header, row, strict=False):
            other = _gpu(name)
            if other is not None and own < other:
                links[own, other] = word
    return links


def parse_nvlinks(text: str) -> dict[int, float]:
    """Returns GB/s of one NVLink of each card, from what `nvidia-smi nvlink --status` prints; of unequal ones the slowest."""
    found: dict[int, float] = {}
    card = None
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            card = int(match[1])
        elif card is not None and (match := re.match(r"\s*Link \d+: ([\d.]+) GB/s", line)):
            found[card] = min(found.get(card, float("inf")), float(match[1]))
    return found


def _gpu(name: str) -> int | None:
    match = re.fullmatch(r"GPU(\d+)", name)
    return int(match[1]) if match else None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _mebibytes(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number * 2**20


def _interfaces(system: pathlib.Path) -> dict[str, float]:
    found = {}
    for path in sorted((system / "net").glob("*")):
        megabits = _read(path / "speed")
        if _read(path / "operstate") == "up" and megabits.isdecimal() and int(megabits):
            found[path.name] = int(megabits) / 8000
    for path in sorted((system / "infiniband").glob("*/ports/*")):
        gigabits = re.match(r"([\d.]+) Gb/sec", _read(path / "rate"))
        if "ACTIVE" in _read(path / "state") and gigabits:
            found[path.parts[-3]] = float(gigabits[1]) / 8
    return found


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def uuids_of(visible: Sequence[str], topology: Topology) -> list[str]:
    """Returns the UUIDs of the GPUs that a process sees, in its order; "" for one that is not to be found.

    Args:
        visible: their ids, as CUDA_VISIBLE_DEVICES spells them: indices, or (beginnings of) UUIDs.
    """
    found = []
    for name in visible:
        cards = [card for card in topology.cards if str(card.index) == name or card.uuid.startswith(name)]
        found.append(cards[0].uuid if len(cards) == 1 else "")
    return found
