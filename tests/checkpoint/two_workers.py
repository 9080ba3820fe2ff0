"""Two workers in one process, a thread each, that can only read variables together.

A read of a Keras variable is a collective here: it waits until the other worker reads the variable of the same path, and fails
when the other does anything else. `barrier` and `share` are of the same kind. What a worker writes is recorded, by thread.
"""

import contextlib
import os
import sys
import threading
import types

import h5py
import keras
import tensorflow as tf
from tensorflow.python.eager import context

from tfdist import keras_hooks

keras_hooks.install()

TIMEOUT_SECONDS = 100
CHIEF, READER = "chief", "reader"


class Meeting:
    """Where two workers do one thing after the other, together. Keeps what they did."""

    def __init__(self):
        self.done = []
        self._here = threading.Barrier(2)
        self._labels = {}

    def attend(self, role, label, value=None):
        """Returns the chief's value when both have come with `label`."""
        self._labels[role] = label, value
        self._here.wait(TIMEOUT_SECONDS)
        both = dict(self._labels)
        self._here.wait(TIMEOUT_SECONDS)
        if len({label for label, _ in both.values()}) > 1:
            raise AssertionError(f"the workers are out of step: {both}")
        if role == CHIEF:
            self.done.append(label)
        return both[CHIEF][1]

    def abort(self):
        self._here.abort()

    def reads(self):
        return [label.removeprefix("read ") for label in self.done if label.startswith("read ")]


class Worker:
    """One of the two: its role, the strategy that its models are made under, and what it wrote."""

    def __init__(self, role, meeting):
        self.role = role
        self.meeting = meeting
        self.written = []
        # Mirrored over one device: its variables know their strategy, as those of tfdist do.
        self.strategy = attach_cluster(tf.distribute.MirroredStrategy(["CPU:0"]), role)
        self.strategy.barrier = lambda name: meeting.attend(role, f"barrier {name}")
        self.strategy.share = lambda name, value: meeting.attend(role, f"share {name}", value)

    @property
    def is_chief(self):
        return self.role == CHIEF


def attach_cluster(strategy, role):
    """Gives a strategy the `cluster` by which tfdist's strategies over several workers are known."""
    strategy.cluster = types.SimpleNamespace(is_chief=role == CHIEF, num_workers=2)
    return strategy


# The worker whose thread this is; None in the test's own.
_thread = threading.local()


def this_worker():
    return getattr(_thread, "worker", None)


def _on_audit(event, arguments):
    worker = this_worker()
    if worker is None:
        return
    if event == "open":
        path, mode, flags = arguments
        writes = any(letter in mode for letter in "wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and path != os.devnull:
            worker.written.append(("open", path))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"):
        worker.written.append((event, *arguments[:2]))


_audited = []


@contextlib.contextmanager
def _recorded(monkeypatch):
    if not _audited:  # a hook stays for the life of the process
        sys.addaudithook(_on_audit)
        _audited.append(True)
    open_h5 = h5py.File.__init__

    def opening(self, name, mode="r", *args, **kwargs):
        worker = this_worker()
        if worker is not None and mode != "r":
            worker.written.append(("h5py", str(name)))
        open_h5(self, name, mode, *args, **kwargs)

    def reading(read):
        def reading_together(self, *args, **kwargs):
            worker = this_worker()
            if worker is not None:
                worker.meeting.attend(worker.role, f"read {self.path}")
            return read(self, *args)  # NumPy may also pass `copy`, which Keras does not know

        return reading_together

    with monkeypatch.context() as patch:
        patch.setattr(h5py.File, "__init__", opening)
        for name in ("__array__", "numpy"):
            patch.setattr(keras.Variable, name, reading(getattr(keras.Variable, name)))
        # TensorFlow would wait for the executors of all threads, also of one that is ending, and has aborted there.
        patch.setattr(context.Context, "sync_executors", lambda self: None)
        yield


def run(monkeypatch, program):
    """Runs `program(worker)` on both workers and returns (chief, reader, meeting); each worker has its `result` or `error`."""
    meeting = Meeting()
    workers = [Worker(role, meeting) for role in (CHIEF, READER)]

    def main(worker):
        _thread.worker, worker.result, worker.error = worker, None, None
        try:
            worker.result = program(worker)
        except BaseException as error:
            worker.error = error
            meeting.abort()  # the other's wait is over, as when a worker of a real job dies

    with _recorded(monkeypatch):
        threads = [threading.Thread(target=main, args=[worker], daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT_SECONDS)
            assert not thread.is_alive(), f"a worker hangs after {meeting.done[-3:]}"
    return *workers, meeting


def succeed(monkeypatch, program):
    """As `run`, and raises the error of the worker that failed."""
    chief, reader, meeting = run(monkeypatch, program)
    errors = [worker.error for worker in (chief, reader) if worker.error is not None]
    for error in errors:  # the broken barrier is only the other's answer
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return chief, reader, meeting
