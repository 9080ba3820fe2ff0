"""The link between the devices of a job: the slowest, since every collective waits for it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from tfdist.doctor.topology import LINKS, Topology


@dataclasses.dataclass(frozen=True)
class Link:
    """A link in words, and what it is said to move in one direction; None where that is not known."""

    words: str
    gb_per_second: float | None = None
    is_nvlink: bool = False
    is_network: bool = False


def link_between(devices: Sequence[dict[str, Any]], topology: Topology) -> Link:
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
