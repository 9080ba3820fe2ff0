"""Finds the groups whose members are processes of one machine, and connects them: when a strategy of several workers is made.

A group gets an `Exchange`, through which its collectives go; or, where its members send each other messages, a `Mailbox`. Not
both: a collective and a message could then hold all threads that run operations.

Whether two workers share a machine is not asked of their addresses: who finds the directory that a group's first member has made
in memory, under a name that occurs nowhere else, shares it.

    first member                         other members
    makes a directory in memory
    ── its path ──────────────────────▶  make their sockets in the directory
    ◀───────── "I have it", or why not ── (everybody hears everybody)
    all of a group have it: each connects to those before it, and is connected to those after it; with that they pass each
    other their own memory, which has no name and lives as long as somebody has it
    all are done: the directory is removed
"""

import contextlib
import io
import mmap
import os
import shutil
import socket
import tempfile
import weakref

from tfdist.collectives.communicator import Communicator
from tfdist.collectives.plan import Ranks
from tfdist.collectives.transports.same_host import AsOtherHosts
from tfdist.extensions.shared_memory.exchange import SLOTS, Exchange, slot_bytes
from tfdist.extensions.shared_memory.mailbox import Mailbox
from tfdist.extensions.shared_memory.peers import PeerLost, Peers
from tfdist.extensions.shared_memory.transport import MailboxMessages, SharedMemory
from tfdist.mesh import DATA_AXES, MESH_AXES, are_cpus
from tfdist.runtime import Coordination, operations_at_once

_MEMORY = "/dev/shm"
_open: weakref.WeakSet[Peers] = weakref.WeakSet()


class InSharedMemory(AsOtherHosts):
    """Workers of one machine with a CPU device each share memory."""

    def connect(
        self,
        communicator: Communicator,
        store: Coordination,
        timeout_seconds: float,
        *,
        is_wanted: bool = True,
        message_axis: str | None = None,
    ) -> None:
        if not are_cpus(communicator.mesh.devices):
            return
        here = communicator.local_ranks[0]
        mesh, axes = communicator.mesh, [message_axis] if message_axis else [*MESH_AXES, *DATA_AXES]
        groups = dict.fromkeys(mesh.group_ranks(mesh_axis, here) for mesh_axis in axes if mesh.size(mesh_axis) > 1)
        # A collective holds a thread that runs operations, and what this thread has put off, until all members come: all of a
        # rank stand on one chain, and it receives one message after the other, so nobody waits for what is held. But ranks of
        # one process may wait for each other; and there must be another thread.
        is_wanted = is_wanted and len(communicator.local_ranks) == 1 and operations_at_once() > 1
        with contextlib.ExitStack() as stack:
            offered = {str(ranks): _directory(stack) for ranks in groups if is_wanted and ranks[0] == here}
            answers = store.all_gather("memory", [is_wanted, offered], timeout_seconds)
            if not all(answer[0] for answer in answers):
                return
            joined = {ranks: _listener(answers[ranks[0]][1][str(ranks)], here, stack) for ranks in groups}
            answers = store.all_gather("memory/joined", [str(ranks) for ranks, one in joined.items() if one], timeout_seconds)
            for ranks, listener in joined.items():
                if listener is None or not all(str(ranks) in answers[rank] for rank in ranks):
                    continue
                memory = io.FileIO(os.memfd_create("tfdist"), "r+")
                if not message_axis:
                    os.posix_fallocate(memory.fileno(), 0, SLOTS * slot_bytes(len(ranks)))  # now: later the system could lack it
                connections, memories = connected(ranks, here, listener, memory, timeout_seconds)
                if message_axis:
                    mailbox = Mailbox(memory, connections, memories)
                    communicator.message_transports.update(dict.fromkeys(connections, MailboxMessages(mailbox)))
                    _open.add(mailbox.peers)
                else:
                    mapped = [mmap.mmap(memories[rank].fileno(), 0) for rank in ranks]
                    places = {ranks.index(rank): connection for rank, connection in connections.items()}
                    exchange = Exchange(mapped, ranks.index(here), places)
                    communicator.transports[ranks] = SharedMemory(exchange)
                    _open.add(exchange.peers)
            store.all_gather("memory/connected", "", timeout_seconds)

    def abort(self, reason: str) -> None:
        for peers in list(_open):
            peers.abort(reason)


def _directory(stack: contextlib.ExitStack) -> str | None:
    """Makes a group's directory; returns its path, or None where there is no such memory."""
    try:
        directory = tempfile.mkdtemp(prefix=f"tfdist-{os.getpid()}-", dir=_MEMORY)
    except OSError:
        return None
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _listener(directory: str | None, here: int, stack: contextlib.ExitStack) -> socket.socket | None:
    """Returns where the members of a group connect to rank `here`, in the group's `directory`; None if it does not see that."""
    if directory is None:
        return None
    listener = stack.enter_context(_socket())
    try:
        listener.bind(f"{directory}/{here}")
    except OSError:
        return None
    listener.listen()
    return listener


def connected(
    ranks: Ranks, here: int, listener: socket.socket, memory: io.FileIO, timeout_seconds: float
) -> tuple[dict[int, socket.socket], dict[int, io.FileIO]]:
    """Connects rank `here` to the other `ranks` of a group, who do the same; returns the connections, and the memory of all.

    Raises:
        PeerLost: one of them has ended, or does not answer in time.
    """
    connections, memories = {}, {here: memory}
    before = ranks[: ranks.index(here)]
    sockets = [_socket() for _ in before]
    listener.settimeout(timeout_seconds)
    try:
        for rank, connection in zip(before, sockets, strict=True):
            connection.settimeout(timeout_seconds)
            connection.connect(f"{os.path.dirname(listener.getsockname())}/{rank}")
        sockets += [listener.accept()[0] for _ in ranks[len(before) + 1 :]]
        for connection in sockets:
            connection.settimeout(timeout_seconds)
            socket.send_fds(connection, [here.to_bytes(4, "little")], [memory.fileno()])
        for connection in sockets:
            greeting, descriptors, *_ = socket.recv_fds(connection, 4, 1)
            rank = int.from_bytes(greeting, "little")
            connections[rank], memories[rank] = connection, io.FileIO(descriptors[0], "r+")
    except (OSError, IndexError) as error:
        raise PeerLost(f"one of the ranks {list(ranks)} has ended, or does not answer: {error}") from error
    return connections, memories


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
