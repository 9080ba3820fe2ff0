"""Finds the groups whose members are processes of one machine, and connects them: when a strategy of several workers is made.

A group gets an `Exchange`, through which its collectives go; or, where its members send each other messages, a `Mailbox`. Not
both: a collective and a message could then hold all threads that run operations.

Whether two workers share a machine is not asked of their addresses: who can open what a group's first member has made in memory,
and reads there what that member has written, shares it.

    first member                         other members
    makes a directory in memory,
    the group's file and its socket
    ── "its path, a secret" ──────────▶  open the file, read the secret, make their sockets in the directory
    ◀───────── "I have it", or why not ── (everybody hears everybody)
    all of a group have it: each connects to those before it, and is connected to those after it
    all are done: the directory is removed; the file lives as long as it is mapped

A mailbox needs no common file: each member passes its own memory, which has no name, to the others.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import secrets
import shutil
import socket
import tempfile
import warnings
import weakref
from typing import Any

from tfdist import errors
from tfdist.collectives.communicator import Communicator
from tfdist.collectives.transports.shared_memory.exchange import Exchange, file_bytes
from tfdist.collectives.transports.shared_memory.mailbox import Mailbox
from tfdist.collectives.transports.shared_memory.peers import Peers
from tfdist.collectives.transports.shared_memory.transport import MailboxMessages, SharedMemory
from tfdist.mesh import DATA_AXES, MESH_AXES
from tfdist.runtime import Coordination, operations_at_once

_MEMORY = "/dev/shm"
_SECRET_BYTES = 16
_open: weakref.WeakSet[Peers] = weakref.WeakSet()


def abort_shared_memory(reason: str) -> None:
    """Makes every collective and message of this process in shared memory that runs, or will run, fail with `reason`."""
    for peers in list(_open):
        peers.abort(reason)


def connect_shared_memory(
    communicator: Communicator,
    store: Coordination,
    timeout_seconds: float,
    *,
    is_wanted: bool = True,
    message_axis: str | None = None,
) -> None:
    """Connects the groups of `communicator` that share a machine: sets its `transports`, or its `message_transports`.

    All workers call it at once. If it is not wanted on one, none is connected. `message_axis` is the mesh axis along which ranks
    send each other messages; None if they send none.
    """
    here = communicator.local_ranks[0]
    mesh, axes = communicator.mesh, [message_axis] if message_axis else [*MESH_AXES, *DATA_AXES]
    groups = dict.fromkeys(mesh.group_ranks(mesh_axis, here) for mesh_axis in axes if mesh.size(mesh_axis) > 1)
    is_wanted = is_wanted and _may_wait(communicator)
    with contextlib.ExitStack() as stack:
        first = [ranks for ranks in groups if is_wanted and ranks[0] == here]
        offered = {str(ranks): _offer(0 if message_axis else file_bytes(len(ranks)), stack) for ranks in first}
        answers = store.all_gather("memory", [is_wanted, offered], timeout_seconds)
        if not all(answer[0] for answer in answers):
            return
        joined = {ranks: _join(ranks, here, answers[ranks[0]][1].get(str(ranks)), stack) for ranks in groups}
        answers = store.all_gather("memory/joined", [str(ranks) for ranks, place in joined.items() if place], timeout_seconds)
        for ranks, place in joined.items():
            if place and all(str(ranks) in answers[rank] for rank in ranks):
                peers = place.connect(len(ranks), timeout_seconds)
                if message_axis:
                    mailbox = Mailbox.connect({ranks[index]: peer for index, peer in peers.items()})
                    others = [rank for rank in ranks if rank != here]
                    communicator.message_transports.update(dict.fromkeys(others, MailboxMessages(mailbox)))
                    _open.add(mailbox.peers)
                elif place.memory is not None:
                    exchange = Exchange(place.memory, place.index, peers)
                    communicator.transports[ranks] = SharedMemory(exchange)
                    _open.add(exchange.peers)
        store.all_gather("memory/connected", "", timeout_seconds)


def _may_wait(communicator: Communicator) -> bool:
    """Whether a collective may hold a thread that runs operations, and what this thread has put off, until all members come.

    All collectives of a rank stand on one chain, so nobody waits for what is held; and of messages a rank receives one after the
    other. But ranks of one process may wait for each other; and there must be another thread.
    """
    return len(communicator.local_ranks) == 1 and operations_at_once() > 1


class _Place:
    """One member's file, if its group has one, and socket while its group is being connected."""

    def __init__(self, memory: mmap.mmap | None, index: int, directory: pathlib.Path, stack: contextlib.ExitStack):
        self.memory = memory
        self.index = index
        self._directory = directory
        self._listener = stack.enter_context(_socket())
        self._listener.bind(str(directory / str(index)))
        self._listener.listen()

    def connect(self, size: int, timeout_seconds: float) -> dict[int, socket.socket]:
        """Returns a connection to each of the `size` members but this one."""
        peers = {}
        for other in range(self.index):
            peers[other] = _socket()
            peers[other].settimeout(timeout_seconds)
            peers[other].connect(str(self._directory / str(other)))
            peers[other].sendall(self.index.to_bytes(4, "little"))
        self._listener.settimeout(timeout_seconds)
        while len(peers) < size - 1:
            connection = self._listener.accept()[0]
            connection.settimeout(timeout_seconds)
            peers[int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")] = connection
        for peer in peers.values():
            peer.settimeout(None)
        return peers


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _offer(count: int, stack: contextlib.ExitStack) -> Any:
    """Makes a group's directory and, of `count` bytes, its file; returns how the others find them, or None if it cannot."""
    try:
        directory = pathlib.Path(tempfile.mkdtemp(prefix=f"tfdist-{os.getpid()}-", dir=_MEMORY))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        secret = secrets.token_bytes(_SECRET_BYTES)
        (directory / "secret").write_bytes(secret)
        with (directory / "memory").open("wb") as file:
            if count:
                os.posix_fallocate(file.fileno(), 0, count)  # here, not when it is written, memory may be short
    except OSError as error:
        if os.path.isdir(_MEMORY):
            warnings.warn(
                errors.message(
                    f"Workers on this machine cannot share memory ({error}): they talk over gRPC, several times slower.",
                    fix=f"Give {_MEMORY} room for {count:,} bytes (in a container, `--shm-size`), or ask for "
                    "gRPC with `CommunicationImplementation.RING`.",
                ),
                stacklevel=2,
            )
        return None
    return [str(directory), secret.hex()]


def _join(ranks: tuple[int, ...], here: int, offered: Any, stack: contextlib.ExitStack) -> _Place | None:
    """Opens what a group's first member has made; None where this process does not see it."""
    if offered is None:
        return None
    directory = pathlib.Path(offered[0])
    try:
        if (directory / "secret").read_bytes().hex() != offered[1]:
            return None
        with (directory / "memory").open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0) if os.fstat(file.fileno()).st_size else None
        return _Place(memory, ranks.index(here), directory, stack)
    except OSError:
        return None
