"""Words between workers, here in one process."""

import contextlib
import os
import socket
import time

import pytest

from tfdist.runtime.peers import Peers

pytestmark = pytest.mark.timeout(60)


@contextlib.contextmanager
def pair():
    """Two workers, 0 and 1, connected over TCP."""
    with socket.create_server(("localhost", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        first, second = Peers(), Peers()
        assert first.add(1, listener.accept()[0]) and second.add(0, connection)
    try:
        yield first, second
    finally:
        first.close()
        second.close()


def heard(peers, number=1):
    found, end = [], time.monotonic() + 20
    while len(found) < number and time.monotonic() < end:
        found += peers.listen(0.1)
    return found


def test_words_arrive_in_order():
    with pair() as (first, second):
        for number in range(5):
            first.tell({"number": number, "text": "ü" * 10_000})
        assert [(index, word["number"]) for index, word in heard(second, 5)] == [(0, number) for number in range(5)]


def test_the_end_of_a_peer_is_told_after_its_words():
    with pair() as (first, second):
        second.tell({"unread": True})  # what lies unread makes the system reset the connection
        first.tell({"last": True})
        first.close()
        assert heard(second, 2) == [(0, {"last": True}), (0, None)]
        assert second.indices() == set()


def test_who_does_not_read_keeps_nobody():
    with pair() as (first, second):
        for _ in range(30):
            first.tell({"text": "x" * 1_000_000})
        first.tell({"lost": True}, may_be_lost=True)
        found = []
        while len(found) < 30:
            found += second.listen(0.1)
            first.tell({}, may_be_lost=True)
        assert all(word.get("text") for _, word in found[:30])
        assert not any("lost" in word for _, word in found)


def test_silence_is_counted_while_one_looks():
    with pair() as (first, second):
        time.sleep(3)  # nobody looks
        second.listen(0.01)
        assert second.silences()[0] < 2
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            second.listen(0.1)
        assert second.silences()[0] > 1.4
        second.excuse(0, 1.4)
        assert second.silences()[0] < 3
        first.tell({"word": 1})
        assert heard(second) and second.silences()[0] == 0


def test_a_forked_process_keeps_no_connection():
    with pair() as (first, second):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)  # until the parent has seen what it is to see
            os._exit(0)
        try:
            first.close()
            assert heard(second) == [(0, None)]
        finally:
            os.close(write)
            os.close(read)
            os.waitpid(child, 0)


def test_one_connection_a_worker():
    with pair() as (first, _):
        one, other = socket.socketpair()
        assert not first.add(1, one)
        first.close()
        assert not first.add(2, other)
        one.close()
        other.close()
