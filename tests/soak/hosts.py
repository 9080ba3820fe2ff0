"""Two hosts on this machine, joined by a cable that can be slow and can be cut: network namespaces and a veth pair.

    host 0 (10.77.n.1)  veth ──────── veth  (10.77.n.2) host 1

Each host has interfaces, ports and a /dev/shm of its own, so that workers on different hosts meet over TCP as on two machines.
Needs root and `ip`, and `tc` for a slow cable: `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

_NOBODY = "02:00:00:00:00:99"  # a link address that no interface has: what is sent there is lost without a word
# Of a slow cable: what may be sent at once (more than the 64 KiB that Linux hands to an interface in one piece), and may wait.
_BURST, _QUEUE = "256kb", "4mb"


@functools.cache
def why_not(rate: str | None = None) -> str:
    """Returns why there can be no hosts here, or none with a cable of `rate`; "" where there can."""
    for program in ("ip",) if rate is None else ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program `{program}` is missing"
    try:
        with joined(rate):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no rights to make network namespaces: {error.stderr.strip()}"


@contextlib.contextmanager
def joined(rate: str | None = None) -> Iterator[Cable]:
    """Makes two hosts and the cable between them; both go afterwards, when their processes have ended.

    Args:
        rate: what each host can send, as `tc` takes it ("1gbit", "100mbit"); None: as much as the machine can copy.
    """
    # Process ids are distinct at any time, and so are the names and networks that are made of them.
    names = [f"tfdist{os.getpid()}h{number}" for number in range(2)]
    memory = pathlib.Path(tempfile.mkdtemp(prefix="tfdist_hosts_", dir="/dev/shm"))
    cable = Cable(names, [f"10.77.{os.getpid() % 250}.{number + 1}" for number in range(2)], memory)
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, cable.addresses, strict=True):
            (memory / name).mkdir()
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "cable", "up")
            if rate is not None:
                limits = ("tbf", "rate", rate, "burst", _BURST, "limit", _QUEUE)
                _run("tc", "-n", name, "qdisc", "add", "dev", "cable", "root", *limits)
        yield cable
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)
        shutil.rmtree(memory, ignore_errors=True)


class Cable:
    """The two hosts, and what can be done to the cable between them.

    Attributes:
        addresses: the IP address of each host.
    """

    def __init__(self, names: Sequence[str], addresses: Sequence[str], memory: pathlib.Path):
        self.addresses = addresses
        self._names = names
        self._memory = memory

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Returns `command` as it is to be called to run on `host`: in the same process, whose id a signal can be sent to."""
        mount = f'mount --bind {self._memory / self._names[host]} /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self._names[host], "sh", "-c", mount, "sh", *command]

    def shared_files(self) -> list[str]:
        """Returns what lies in the hosts' /dev/shm."""
        return sorted(path.name for name in self._names for path in (self._memory / name).iterdir())

    def sent_bytes(self) -> list[int]:
        """Returns the bytes that each host has sent so far, with the headers of what carried them."""
        found = [_ip("-n", name, "-s", "-json", "link", "show", "dev", "cable") for name in self._names]
        return [json.loads(text)[0]["stats64"]["tx"]["bytes"] for text in found]

    def lose(self, sender: int) -> None:
        """From now on what `sender` sends is lost, and nobody is told: a cable of which one direction is broken."""
        _ip("-n", self._names[sender], "neigh", "replace", self.addresses[1 - sender], "lladdr", _NOBODY, "dev", "cable")

    def pull(self) -> None:
        """From now on what either host sends is lost, and nobody is told: a switch in between has no power."""
        for host in range(2):
            self.lose(host)

    def take_down(self, host: int) -> None:
        """Takes down the interface of `host`: it sees itself that nothing can be sent."""
        _ip("-n", self._names[host], "link", "set", "cable", "down")

    def mend(self) -> None:
        """Makes the cable whole again, whatever was done to it."""
        for host in range(2):
            _ip("-n", self._names[host], "link", "set", "cable", "up")
            with contextlib.suppress(subprocess.CalledProcessError):  # there is no such entry
                _ip("-n", self._names[host], "neigh", "delete", self.addresses[1 - host], "dev", "cable")


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
