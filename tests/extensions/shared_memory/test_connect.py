"""Workers on one machine meet in memory, and compute there what the ring computes."""

import io
import os
import threading

import numpy as np
import pytest
import tensorflow as tf

from tests import workers
from tests.extensions.shared_memory.connect_cases import DTYPES, WORKERS
from tfdist.extensions.shared_memory import connect
from tfdist.extensions.shared_memory.peers import PeerLost


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each worker has found."""
    target = "tests.extensions.shared_memory.connect_cases:run_everything"
    with workers.job(tmp_path_factory.mktemp("workers"), WORKERS, target) as job:
        return job.results(200)


pytestmark = pytest.mark.timeout(240)
ALL = tuple(range(WORKERS))


def test_workers_of_one_machine_share_memory_unless_told_not_to(found):
    for worker in found:
        assert (worker["AUTO groups"], worker["RING groups"]) == ([ALL], [])
    for rank, worker in enumerate(found):
        assert (worker["AUTO mailbox"], worker["RING mailbox"]) == ([other for other in ALL if other != rank], [])


@pytest.mark.parametrize("way", ["AUTO", "RING"])
def test_messages(found, way):
    for rank, worker in enumerate(found):
        sent = np.arange(14.0).reshape(7, 2) + 100 * ((rank - 1) % WORKERS)
        received = worker[f"{way} messages"]
        for dtype in (*DTYPES, "bool"):
            expected = sent % 2 if dtype == "bool" else tf.cast(tf.cast(sent, dtype), tf.float64).numpy()
            for name, rows in {"7 rows": 7, "3 rows": 3, "of known size": 7}.items():
                np.testing.assert_array_equal(received[f"{dtype} {name}"], expected[:rows], err_msg=f"{dtype} {name}")
        np.testing.assert_array_equal(received["loop"], np.arange(14.0).reshape(7, 2) + 100 * ((rank - 5) % WORKERS) + 5)
        assert received["unread"] == ([0] if way == "AUTO" else []), "what nobody needs is taken all the same"


@pytest.mark.parametrize("what", ["collectives", "messages"])
@pytest.mark.parametrize("way", ["AUTO", "RING"])
def test_a_step_that_is_traced_again_leaves_no_graph_behind(found, way, what):
    for worker in found:
        counts = worker[f"{way} graphs of {what}"]
        assert len(set(counts[1:])) == 1, counts


def test_both_ways_agree(found):
    """All values are small whole numbers, of which every sum is exact."""
    for worker in found:
        assert len(worker["AUTO"]) > 70 and list(worker["AUTO"]) == list(worker["RING"])
        for name, value in worker["AUTO"].items():
            np.testing.assert_array_equal(value, worker["RING"][name], err_msg=name)


def test_the_order_of_lengths_and_of_a_loop(found):
    for worker in found:
        assert worker["AUTO"]["lengths"].tolist() == [0, 0, 1]
        assert worker["AUTO"]["of a loop"].tolist() == [6.0] * 5


def test_nothing_is_left_in_memory(found):
    """The memory has no name."""
    for rank, worker in enumerate(found):
        assert worker["AUTO directories"] == (["/dev/shm"] if rank == 0 else []) and worker["RING directories"] == []
        assert worker["left behind"] == []


CASES = ["no memory", "another machine", "one thread", "one thread of one worker"]


@pytest.mark.parametrize("case", CASES)
def test_where_memory_cannot_be_shared_no_worker_uses_it(found, case):
    for worker in found:
        assert worker["other groups"][case] == []


@pytest.mark.parametrize("ends", ["at once", "when it has what it was sent"])
def test_who_goes_before_it_has_passed_its_memory(tmp_path, ends):
    with connect._socket() as listener, connect._socket() as other:
        listener.bind(str(tmp_path / "3"))
        listener.listen()
        other.connect(str(tmp_path / "3"))
        if ends == "at once":
            other.close()
        else:
            threading.Timer(0.2, other.close).start()
        with io.FileIO(os.memfd_create("test"), "r+") as memory, pytest.raises(PeerLost, match=r"\[3, 5\] has ended"):
            connect.connected((3, 5), 3, listener, memory, 20.0)
