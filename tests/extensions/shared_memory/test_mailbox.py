"""Messages through a mailbox, between threads that stand for processes."""

import io
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from tfdist.extensions.shared_memory.mailbox import Mailbox
from tfdist.extensions.shared_memory.peers import PeerLost


def mailboxes(size):
    """`size` mailboxes, each connected with all others; and the files of their memory."""
    memory = [io.FileIO(os.memfd_create("test"), "r+") for _ in range(size)]
    peers = [{} for _ in range(size)]
    for one in range(size):
        for other in range(one):
            peers[one][other], peers[other][one] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [Mailbox(memory[rank], peers[rank], {other: memory[other] for other in peers[rank]}) for rank in range(size)], memory


def receive(mailbox, source, key, shape, dtype):
    found = np.empty(shape, dtype)
    mailbox.receive(source, key, found)
    return found


DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16, "int32", "int64", "bool", "uint8"]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 3), (500, 33)])
def test_what_is_sent_arrives(dtype, shape):
    (first, second), _ = mailboxes(2)
    x = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    first.send(1, 5, x)
    found = receive(second, 0, 5, shape, dtype)
    np.testing.assert_array_equal(found, x)


def test_a_message_is_a_copy():
    (first, second), _ = mailboxes(2)
    x = np.arange(5)
    first.send(1, 5, x)
    x += 1
    np.testing.assert_array_equal(receive(second, 0, 5, (5,), x.dtype), np.arange(5))


def test_messages_are_found_by_key_and_sender_and_come_in_order():
    (first, second, third), _ = mailboxes(3)
    sent = {(0, 1): [1, 2], (0, 2): [3], (2, 1): [4, 5]}
    for (source, key), numbers in sent.items():
        for number in numbers:
            (first if source == 0 else third).send(1, key, np.array([number]))
    for source, key in [(2, 1), (0, 2), (0, 1), (2, 1), (0, 1)]:
        assert receive(second, source, key, (1,), np.int64) == [sent[source, key].pop(0)]


def test_memory_grows_to_what_is_under_way_at_once():
    (first, second), (memory, other) = mailboxes(2)
    x = np.ones(90_000, np.float32)  # in a slot of 512 KiB
    for _ in range(20):
        first.send(1, 0, x)
        receive(second, 0, 0, x.shape, x.dtype)
    assert os.fstat(memory.fileno()).st_size < 2**19, "the slot that has been read is written again"
    for _ in range(3):
        first.send(1, 0, x)
    assert 2**20 < os.fstat(memory.fileno()).st_size < 3 * 2**19
    for _ in range(6):
        first.send(1, 1, np.ones(300_000, np.float32))  # in slots of 2 MiB
    assert os.fstat(memory.fileno()).st_blocks * 512 < 4 * x.nbytes + 6 * 1_210_000, "only what has been written takes room"
    assert os.fstat(other.fileno()).st_size == 0, "who sends nothing has no memory"


def test_who_receives_waits():
    (first, second), _ = mailboxes(2)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(receive, second, 0, 0, (2,), np.float64)
        time.sleep(0.2)
        assert not found.done()
        first.send(1, 1, np.zeros(2))
        time.sleep(0.1)
        assert not found.done(), "of another key"
        first.send(1, 0, np.ones(2))
        np.testing.assert_array_equal(found.result(20), [1, 1])


def test_more_notices_than_a_socket_holds_block_nobody():
    """Three send each other thousands of messages, all before they receive any."""
    members, _ = mailboxes(3)
    count, x = 3000, np.zeros(1)

    def exchange(rank):
        others = [other for other in range(3) if other != rank]
        for number in range(count):
            for other in others:
                members[rank].send(other, number, x + number)
        return all(receive(members[rank], other, number, (1,), x.dtype) == number for number in range(count) for other in others)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(exchange, range(3), timeout=60))


def test_a_receiver_finds_what_a_blocked_sender_of_its_process_has_read():
    """Both wait for the same socket; the sender may take the notice that the receiver waits for."""
    (first, second), _ = mailboxes(2)
    count, x = 2000, np.zeros(1)

    def both(mailbox, other):
        def send_all():
            for number in range(count):
                mailbox.send(other, number, x + number)

        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(send_all)
            found = [float(receive(mailbox, other, number, (1,), x.dtype)[0]) for number in range(count)]
            sending.result(60)
        return found

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(both, (first, second), (1, 0), timeout=60):
            assert found == list(range(count))


def test_a_message_of_another_size():
    (first, second), _ = mailboxes(2)
    first.send(1, 0, np.zeros(3))
    with pytest.raises(PeerLost, match=r"rank 0 has sent 24 bytes instead of the 32 of \(4,\), float64"):
        receive(second, 0, 0, (4,), np.float64)


def test_who_has_gone():
    """What it has sent arrives; then its peers are told."""
    (first, second, third), _ = mailboxes(3)
    first.send(1, 0, np.ones(1))
    for connection in first.peers._connections.values():
        connection.close()
    assert receive(second, 0, 0, (1,), np.float64) == [1]
    with pytest.raises(PeerLost, match="rank 0 has ended"):
        receive(second, 0, 1, (1,), np.float64)
    with pytest.raises(PeerLost, match="rank 0 has ended"):
        second.send(0, 1, np.ones(1))
    third.send(1, 0, np.full(1, 3.0))
    assert receive(second, 2, 0, (1,), np.float64) == [3], "others go on"


def test_abort_ends_a_wait():
    (first, second), _ = mailboxes(2)
    threading.Timer(0.2, second.peers.abort, ["worker 0 is stuck"]).start()
    with pytest.raises(PeerLost, match="worker 0 is stuck"):
        receive(second, 0, 0, (1,), np.float64)
    with pytest.raises(PeerLost, match="worker 0 is stuck"):
        second.send(0, 0, np.ones(1))
