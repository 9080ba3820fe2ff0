"""Workers find each other before TensorFlow starts; here they are threads."""

import contextlib
import socket
import threading
import time

import pytest

from tests.workers import free_ports
from tfdist.runtime import Cluster, Task
from tfdist.runtime.failure import Failure
from tfdist.runtime.rendezvous import WorkerFailedError, tell_of_failure, wait_for_workers

pytestmark = pytest.mark.timeout(60)


def cluster_on(ports, index):
    tasks = tuple(Task("worker", number, f"localhost:{port}") for number, port in enumerate(ports))
    return Cluster(tasks, index)


class Worker(threading.Thread):
    """Waits for the others, and keeps what became of it."""

    def __init__(self, ports, index, timeout_seconds, cluster=None):
        super().__init__(daemon=True)
        self._arguments = (cluster or cluster_on(ports, index), timeout_seconds)
        self.error = None
        self.start()

    def run(self):
        try:
            self.peers = wait_for_workers(*self._arguments)
        except Exception as error:  # the test looks at it
            self.error = error


def run(ports, present, timeout_seconds, delays=None):
    workers = []
    for index in present:
        time.sleep((delays or {}).get(index, 0))
        workers.append(Worker(ports, index, timeout_seconds))
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()
    return [worker.error for worker in workers]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_all_come(order):
    assert run(free_ports(4), order, 20, delays={order[-1]: 0.5}) == [None] * 4


def test_the_chief_names_who_is_missing_to_all():
    ports = free_ports(4)
    errors = run(ports, [0, 2], 1.5)
    for error in errors:
        assert isinstance(error, TimeoutError)
        assert str(error) == f"worker 1 (localhost:{ports[1]}), worker 3 (localhost:{ports[3]}) did not come"


def test_no_chief():
    ports = free_ports(2)
    (error,) = run(ports, [1], 1)
    assert isinstance(error, TimeoutError) and f"worker 0 (localhost:{ports[0]}) cannot be reached" in str(error)


def test_a_port_in_use():
    ports = free_ports(2)
    with socket.create_server(("", ports[1])):
        (error,) = run(ports, [1], 5)
    assert isinstance(error, RuntimeError) and f"port {ports[1]}, which TF_CONFIG gives it, cannot be used" in str(error)


def test_something_else_listens_at_the_chiefs_address():
    ports = free_ports(2)
    with socket.create_server(("", ports[0])) as other:

        def greet():
            with contextlib.suppress(OSError):
                while True:
                    other.accept()[0].sendall(b"SSH-2.0-OpenSSH\n")

        threading.Thread(target=greet, daemon=True).start()
        (error,) = run(ports, [1], 1)
    assert "what listens there is not that worker of this job" in str(error)


def check_in(port, words):
    """Returns a connection to what listens, or will listen, at `port`, which has been told `words`."""
    while True:
        try:
            connection = socket.create_connection(("localhost", port))
            break
        except OSError:
            time.sleep(0.05)
    connection.sendall(words)
    return connection


def test_strangers_do_not_count():
    ports = free_ports(3)
    chief = Worker(ports, 0, 20)
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"tfdist 7\n", b"tfdist x\n", b"tfdist\n", b"\n"):
        check_in(ports[0], words).close()
    first = Worker(ports, 1, 20)
    first.join(1.0)
    assert first.is_alive() and chief.is_alive()
    second = Worker(ports, 2, 20)
    for worker in (chief, first, second):
        worker.join(20)
        assert not worker.is_alive() and worker.error is None


def test_a_worker_that_ends_meanwhile_is_told_at_once():
    ports = free_ports(3)
    workers = [Worker(ports, index, 50) for index in range(2)]
    time.sleep(1)  # they are connected
    check_in(ports[0], b"tfdist 2\n").close()
    for worker in workers:
        worker.join(20)
        assert not worker.is_alive() and isinstance(worker.error, WorkerFailedError)
        assert worker.error.failure == Failure(2, "ended while the workers of the job were connecting")


def test_the_launcher_tells_of_a_worker_that_has_ended_before():
    ports = free_ports(3)
    workers = [Worker(ports, index, 50) for index in range(2)]
    time.sleep(1)  # they are connected
    failure = Failure(2, "failed with exit code 1")
    while not tell_of_failure(cluster_on(ports, 0).tasks[0], failure):
        time.sleep(0.05)
    for worker in workers:  # the other one has it from the first
        worker.join(20)
        assert not worker.is_alive() and worker.error.failure == failure
    assert not tell_of_failure(cluster_on(ports, 0).tasks[2], failure)


def test_an_address_that_nobody_can_reach_is_named():
    ports = free_ports(2)
    addresses = [f"localhost:{ports[0]}", f"nobody.invalid:{ports[1]}"]
    tasks = tuple(Task("worker", number, address) for number, address in enumerate(addresses))
    workers = [Worker(ports, index, 2, Cluster(tasks, index)) for index in range(2)]
    for worker in workers:
        worker.join(30)
        words = f"worker 1 (nobody.invalid:{ports[1]}) cannot be reached from worker 0 (localhost:{ports[0]}): Name or service"
        assert isinstance(worker.error, TimeoutError) and words in str(worker.error)
