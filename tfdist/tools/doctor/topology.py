"""Which links the GPUs of this machine have, as `nvidia-smi` tells, and what its network interfaces are said to do.

The link of a job is the slowest between its devices, since every collective waits for it.
Speeds are those of one direction, in GB/s, as bus bandwidths are.
"""

import dataclasses
import itertools
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
    """The links of one machine."""

    cards: tuple[Card, ...] = ()
    # Between two cards, by their indices, the lower first: a word of `nvidia-smi topo -m`, such as "NV12" or "PHB".
    links: dict[tuple[int, int], str] = dataclasses.field(default_factory=dict)
    # Of one NVLink of a card, by its index, where `nvidia-smi nvlink` tells it.
    nvlink_gb_per_second: dict[int, float] = dataclasses.field(default_factory=dict)
    interfaces: dict[str, float] = dataclasses.field(default_factory=dict)  # GB/s of those that are up, by name
    unknown: tuple[str, ...] = ()  # what could not be found out, and why

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
        return {**dataclasses.asdict(self), "links": links}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Topology":
        """Returns the topology that `to_json` has made `found` of, whose numbers JSON may have made strings and tuples lists."""
        return cls(
            cards=tuple(Card(**card) for card in found["cards"]),
            links={(link["cards"][0], link["cards"][1]): link["link"] for link in found["links"]},
            nvlink_gb_per_second={int(index): speed for index, speed in found["nvlink_gb_per_second"].items()},
            interfaces=found["interfaces"],
            unknown=tuple(found["unknown"]),
        )


@dataclasses.dataclass(frozen=True)
class Link:
    """A link in words, and what it is said to move in one direction; None where that is not known."""

    words: str
    gb_per_second: float | None = None
    is_nvlink: bool = False
    is_network: bool = False


def link_between(devices: Sequence[dict[str, Any]], topology: "Topology") -> Link:
    """Returns the slowest link between any two of `devices`.

    Args:
        devices: each with its "device", "uuid" and "host".
        topology: of the first one's machine.
    """
    if len(devices) < 2:
        return Link("no link: there is one device")
    hosts = {device["host"] for device in devices}
    if len(hosts) > 1:
        fastest = max(topology.interfaces.values(), default=None)
        names = [name for name, speed in topology.interfaces.items() if speed == fastest]
        words = f"the network between {len(hosts)} machines"
        return Link(f"{words} (the fastest interface is {names[0]})" if names else words, fastest, is_network=True)
    if any("GPU" not in device["device"] for device in devices):
        return Link("the memory of one machine")
    uuids = [device["uuid"] for device in devices]
    if len(set(uuids)) < len(uuids) and all(uuids):
        return Link("the memory of one card")
    found = [topology.link(first, second) for first, second in itertools.combinations(uuids, 2)]
    if not all(word for word, _ in found):
        return Link("links that are not known")
    # Without a figure of one link the slowest is not known; a word stands for its kind.
    word, speed = min(found, key=lambda link: (link[1] is not None, link[1] or 0.0))
    is_nvlink = word.startswith("NV")
    return Link(f"{word} ({LINKS.get('NV' if is_nvlink else word, 'unknown')})", speed, is_nvlink=is_nvlink)


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


def read_topology(ask: Callable[..., str] = ask_nvidia_smi, system: pathlib.Path = pathlib.Path("/sys/class")) -> "Topology":
    """Returns what this machine tells of its links; what it does not tell is in `unknown`."""
    unknown: list[str] = []

    def asked(what: str, parse: Callable[[str], Any], *arguments: str) -> Any:
        try:
            return parse(ask(*arguments))
        except FileNotFoundError:
            unknown.append("links between GPUs: there is no nvidia-smi here")
        except (OSError, ValueError) as error:
            unknown.append(f"{what} failed: {error}")
        return {}

    cards = asked("links between GPUs: nvidia-smi", parse_cards, f"--query-gpu={_CARD_FIELDS}", "--format=csv,noheader,nounits")
    links = {} if unknown else asked("links between GPUs: nvidia-smi topo -m", parse_links, "topo", "-m")
    has_nvlinks = any(map(_LINK.match, links.values()))
    speeds = asked("the speed of NVLinks: nvidia-smi nvlink --status", parse_nvlinks, "nvlink", "--status") if has_nvlinks else {}
    return Topology(tuple(cards), links, speeds, _interfaces(system), tuple(unknown))


def parse_cards(text: str) -> list[Card]:
    """Returns the cards in the CSV that `nvidia-smi --query-gpu` prints."""
    cards = []
    for line in filter(str.strip, text.splitlines()):
        index, uuid, name, total, used, driver, generation, width = (field.strip() for field in line.split(","))
        lane, lanes = _PCIE_LANE.get(_number(generation) or 0), _number(width)
        speed = round(lane * lanes, 2) if lane and lanes else None
        cards.append(Card(int(index), uuid, name, _number(total, 2**20), _number(used, 2**20), driver, speed))
    return cards


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """Returns the links between GPUs in the table that `nvidia-smi topo -m` prints."""
    rows = [[cell.strip() for cell in line.split("\t")] for line in _COLOURS.sub("", text).splitlines()]
    header = next((row for row in rows if "GPU0" in row[1:]), None)
    if header is None:
        raise ValueError("there is no row of GPUs in its table")
    gpus = {name: int(name[3:]) for name in header if re.fullmatch(r"GPU\d+", name)}
    return {
        (gpus[row[0]], gpus[name]): word
        for row in rows
        for name, word in zip(header, row, strict=False)
        if row[0] in gpus and name in gpus and gpus[row[0]] < gpus[name]
    }


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


def _number(text: str, unit: int = 1) -> int | None:
    return int(text) * unit if text.isdecimal() else None


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


def uuids_of(visible: Sequence[str], topology: "Topology") -> list[str]:
    """Returns the UUIDs of GPUs in order, "" for one that is not to be found.

    They are `visible` to a process, as CUDA_VISIBLE_DEVICES spells them: indices, or (beginnings of) UUIDs.
    """
    found = []
    for name in visible:
        cards = [card for card in topology.cards if str(card.index) == name or card.uuid.startswith(name)]
        found.append(cards[0].uuid if len(cards) == 1 else "")
    return found
