"""Failures that speak: when a worker dies, raises, falls silent or hangs, every other worker ends, with a message that names it.

Every worker has a connection to every other, from the rendezvous on, and a thread that listens to all of them, whatever the main
thread does:

    a worker raises                its `sys.excepthook` tells what it raised
    a worker's process is gone     its connection ends, without a word
    a worker is silent             no word for the peer timeout: it is stopped, or its machine or the network is gone
    a worker hangs                 its words say that it waits for nobody, when others have waited for the step timeout
    a worker's program has ended   it has said so, and its peers wait in a collective for it
    a worker has other data        its words have digests of batches, which must be those of all
    a worker waits elsewhere       its words say at which meeting, which its peers, in a collective, have not come to

A word every other second tells what a worker is doing. Who learns of a failure tells all others, so that all tell the same
story. Then collectives are aborted, so that the training loop raises, and a process that has not ended some seconds later is
ended.

Note: silence and the interpreter.
A thread of Python is silent, too, while a call of another holds the interpreter's lock, which may last. So a worker that nothing
is heard of is asked by TensorFlow's server, whose threads need no interpreter: one that answers lives.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.runtime import coordination
from tfdist.runtime.cluster import Cluster
from tfdist.runtime.failure import Failure, end_process
from tfdist.runtime.first_line import first_line, is_of_python
from tfdist.runtime.interrupts import Interrupts
from tfdist.runtime.peers import Peers, Word
from tfdist.runtime.rendezvous import WorkerFailedError, wait_for_workers
from tfdist.runtime.standing import any_is_in_tensorflow, both_places, main_is_in_tensorflow, where_beside, where_it_stands
from tfdist.runtime.watched import APART_SECONDS, Watched, point_of, who_never_comes

# How long the thread waits for words before it looks at this worker itself.
_LOOK_SECONDS = 0.5
# Words about oneself come so often, or five times within the peer timeout.
_BEAT_SECONDS = 2.0
# After its collectives were aborted, a worker has this long to end by itself; before there are any, this long.
_GRACE_SECONDS = 12.0
_GRACE_WHILE_CONNECTING_SECONDS = 3.0
# So long the chief, who hosts the store, waits at the end of its program for workers that have something left to do on their own.
_LAST_SECONDS = 3600.0
# A program that waits for a worker whose own program has ended is given this long: the end may have come just after it, and a
# busy machine can take seconds for the rest.
_ENDED_SECONDS = 10.0
# The main thread has so long to handle Ctrl-C itself.
_INTERRUPT_SECONDS = 3.0
_INTERRUPTED_EXIT_CODE = 130
# Who waits for another worker outside of steps looks up this often at least.
_AWAITED_SECONDS = 5.0
# A collective that fails is followed by a word of the one whose fault it is, within this time.
_CAUSE_SECONDS = 15.0

_COLLECTIVE_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)


class FailureWatch:
    """Watches the other workers of `cluster`, and tells them of this one. One per process.

    Args:
        abort: makes what waits for another worker in this process fail with a message, beside TensorFlow's collectives.
        peer_timeout_seconds: after so long without a word a worker is taken for lost.
    """

    def __init__(self, cluster: Cluster, abort: Callable[[str], None], peer_timeout_seconds: float):
        self._cluster = cluster
        self._abort = abort
        self._peer_timeout = peer_timeout_seconds
        self._beat_seconds = min(_BEAT_SECONDS, peer_timeout_seconds / 5)
        self._peers = Peers()
        self._beats: dict[int, Word] = {}  # the last word of each other worker about itself
        self.listeners: dict[str, Callable[[int, Any], str]] = {}  # called with a worker, and what it tells them
        self._ended: dict[int, float] = {}  # whose programs have ended, and when
        self.watched: list[Watched] = []  # strategies; all workers add theirs in the same order
        self._idle_since = time.monotonic()
        self._awaited: tuple[int | None, float] = (None, 0.0)  # whom the main thread waits for outside of steps, and when it did
        self._next_look = 0.0
        self._next_beat = 0.0
        self._failure: Failure | None = None
        self._known = threading.Event()
        self._raised = False
        self._is_ending = False
        self.servers_run = False  # whether TensorFlow's have met: there are collectives, and who is silent can be asked
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._watch, name="tfdist failure watch", daemon=True)

    def start(self, timeout_seconds: float) -> None:
        """Takes part in the end of the process, finds the other workers, and watches them from now on.

        Raises:
            RuntimeError: one has ended, or this machine already uses the port of this worker.
            TimeoutError: workers are missing after `timeout_seconds`; it names them.
        """
        self._interrupts = Interrupts()
        previous = sys.excepthook
        sys.excepthook = lambda *error: self._on_exception(previous, *error)
        atexit.register(self._at_exit)
        try:
            self._peers = wait_for_workers(self._cluster, timeout_seconds)
        except WorkerFailedError as error:
            self._learn(error.failure)
            raise RuntimeError(error.failure.message(self._cluster)) from None
        self._thread.start()

    def close(self) -> None:
        """Lets go of the other workers, with whom there will be no job."""
        self._is_ending = True
        self._known.set()
        self._peers.close()

    def check(self, awaited: int | None = None) -> None:
        """Raises RuntimeError when the job has failed, or worker `awaited` has ended: for code that waits for another worker."""
        now = time.monotonic()
        self._awaited = (awaited, now)
        # What it has written before its end has been read meanwhile.
        if self._failure is None and now - self._ended.get(awaited, now) > _AWAITED_SECONDS:
            self._learn(self._early(awaited))
        if self._failure is not None:
            raise RuntimeError(self._failure.message(self._cluster))

    def report(self, message: str, awaited: int | None = None) -> None:
        """Tells the other workers of an error that this worker is about to raise, and that ends the job.

        `awaited` is the worker that did not come to where this one has waited for it, and whose fault it is.
        """
        failure = Failure(self._cluster.worker_index, f"raised RuntimeError: {message}", is_of_program=True)
        if awaited is not None:
            what = f"did not come to where others waited for it{self._standing(awaited)}; {message}"
            failure = Failure(awaited, what, is_of_program=True)
        # What another thread raises ends that thread alone.
        self._raised = awaited is None and threading.current_thread() is threading.main_thread()
        self._learn(failure)

    def tell(self, listener: str, value: Any) -> None:
        """Tells the others' `listener` of that name this `value`, what JSON can carry, and waits for nobody; for any thread.

        Where the listener has words, the job ends with them.
        """
        self._peers.tell({"for": [listener, value]})

    # The thread

    def _watch(self) -> None:
        failure = None
        try:
            while failure is None and not self._known.is_set():
                failure = self._turn()
        except BaseException as error:  # unwatched, the job could wait for ever
            failure = Failure(self._cluster.worker_index, f"cannot watch the others: {first_line(error)}")
        if failure is not None or not self._raised:
            self._end(failure or self._failure)

    def _turn(self) -> Failure | None:
        """Looks at all once; returns what has ended the job, if something has."""
        found = [self._heard(index, word) for index, word in self._peers.listen(_LOOK_SECONDS)]
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            is_running = any_is_in_tensorflow()
            waiting = [one for watched in self.watched for one in watched.waiting(is_running)]
            if now >= self._next_beat:
                self._next_beat = now + self._beat_seconds
                self._beat(waiting)
            self._end_if_interrupted(waiting)
            lost = self._silent()
            if self._is_ending:
                self._ended |= {lost.worker_index: now} if lost else {}
            else:
                found += [lost, self._stuck(waiting)]
        return next((failure for failure in found if failure is not None), None)

    def _heard(self, index: int, word: Word | None) -> Failure | None:
        if word is None:
            is_expected = self._is_ending or index in self._ended
            return None if is_expected else Failure(index, "died: its process is gone")
        if "failed" in word:
            return None if self._is_ending else Failure.from_word(word)
        if "ended" in word:
            self._ended[index] = time.monotonic()
        if "for" in word:
            listener, value = word["for"]
            words = self.listeners[listener](index, value) if listener in self.listeners else ""
            return Failure(None, words, is_of_program=True) if words and not self._is_ending else None
        if "beat" in word:
            self._beats[index] = word["beat"]
        return None

    def _beat(self, waiting: list[tuple[float, float, Any]]) -> None:
        """Tells the others that this worker lives, and what it is doing."""
        now = time.monotonic()
        awaited, asked = self._awaited
        is_waiting = bool(waiting) or self._is_ending or (awaited is not None and now - asked < _AWAITED_SECONDS)
        self._idle_since = now if is_waiting else self._idle_since
        self._peers.tell({"beat": self._own_beat()}, may_be_lost=True)

    def _own_beat(self) -> Word:
        idle = time.monotonic() - self._idle_since
        return {"at": where_it_stands(), "beside": where_beside(), "idle": idle, "point": point_of(self.watched)}

    def _silent(self) -> Failure | None:
        """Returns the failure of a worker that has been silent for too long, and does not answer."""
        for index, seconds in self._peers.silences().items():
            if seconds > self._peer_timeout and index not in self._ended:
                # Note: silence and the interpreter
                if self.servers_run and coordination.is_reachable(self._cluster.tasks[index]):
                    self._peers.excuse(index, self._peer_timeout / 10)
                else:
                    return Failure(index, self._how_silent(seconds))
        return None

    def _how_silent(self, seconds: float) -> str:
        silences = self._peers.silences()
        silent = f"has not been heard of for {seconds:.0f} s (`peer_timeout_seconds`)"
        if len(silences) > 1 and min(silences.values()) > self._peer_timeout / 2:
            return f"{silent}, nor has any other: the network of this machine is cut"
        return f"{silent}: it is stopped, or its machine or the network between is gone"

    def _stuck(self, waiting: list[tuple[float, float, Any]]) -> Failure | None:
        """Returns a failure when a rank of this worker waits in a collective for too long."""
        for seconds, limit, program in waiting:
            if seconds > APART_SECONDS and (apart := self._apart(program)):
                return apart
            if seconds > _ENDED_SECONDS and self._ended:
                return self._early(min(self._ended), f" in {program}")
            if seconds > limit:
                return self._behind(seconds, program)
        return None

    def _apart(self, program: Any) -> Failure | None:
        """Returns the failure of workers that wait for each other at different points, of which this one's is `program`."""
        index, point = who_never_comes(self.watched, self._beats, program)
        if index is None:
            return None
        return Failure(
            None,
            f"{self._cluster.tasks[index]} waits {point}{self._standing(index)}; "
            f"meanwhile {self._cluster.task} waits for it in {program}, at {where_it_stands()}. What one worker does, all "
            "must do: give every worker the same callbacks, and save and evaluate on all of them, or on none",
            is_of_program=True,
        )

    def _early(self, index: int | None, program: str = "") -> Failure:
        """Returns the failure of a worker whose program has ended, while this one waits for it."""
        what = f"ended its program while {self._cluster.task} was waiting for it{program}, at {where_it_stands()}"
        return Failure(index, f"{what}: what one worker does, all must do", is_of_program=True)

    def _behind(self, seconds: float, program: Any) -> Failure:
        """Returns the failure of the worker that others have waited for: it is silent, or waits for nobody."""
        waited = f"{self._cluster.task} has waited for {seconds:.0f} s (`step_timeout_seconds`) in {program}"
        silences = self._peers.silences()
        silent = max(silences, key=silences.__getitem__, default=None)
        if silent is not None and silences[silent] > 3 * self._beat_seconds:
            return Failure(silent, f"has not been heard of for {silences[silent]:.0f} s: {waited}")
        idle = {index: beat["idle"] for index, beat in self._beats.items() if index in silences}
        index = max(idle, key=idle.__getitem__, default=None)
        if index is not None and idle[index] > 0:
            return Failure(index, f"did not join the others{self._standing(index)}; {waited}", is_of_program=True)
        beats = self._beats | {self._cluster.worker_index: self._own_beat()}
        places = "; ".join(f"worker {index} at {both_places(beat)}" for index, beat in sorted(beats.items()))
        alone = [index for index, beat in beats.items() if beat["beside"]]
        reads = f", and worker {alone[0]} alone runs code of its own, which the others may wait for" if len(alone) == 1 else ""
        return Failure(None, f"No worker makes progress: {waited}{reads}: {places}", is_of_program=True)

    def _standing(self, index: int) -> str:
        beat = self._beats.get(index)
        return f": its main thread is at {both_places(beat)}" if beat else ""

    def _end_if_interrupted(self, waiting: list[tuple[float, float, Any]]) -> None:
        """Ends a process whose main thread does not see that Ctrl-C was pressed: it waits in TensorFlow, for no collective."""
        is_deaf = not self.servers_run or (main_is_in_tensorflow() and not waiting)
        if self._interrupts.unhandled_seconds() > _INTERRUPT_SECONDS and is_deaf:
            what = f"was interrupted: its main thread was at {both_places(self._own_beat())}"
            failure = Failure(self._cluster.worker_index, what)
            self._learn(failure)
            failure.say(self._cluster)
            end_process(_INTERRUPTED_EXIT_CODE)

    def _end(self, failure: Failure) -> None:
        self._learn(failure)
        if self._is_ending:
            return
        if self.servers_run:
            self._abort(failure.message(self._cluster))
            coordination.abort_collectives(failure.message(self._cluster))
        time.sleep(_GRACE_SECONDS if self.servers_run else _GRACE_WHILE_CONNECTING_SECONDS)
        if not self._is_ending:
            failure.say(self._cluster)
            end_process(self._exit_code(failure))

    def _learn(self, failure: Failure) -> None:
        """Keeps the first failure, and tells the others."""
        if self._failure is None:
            self._failure = failure
            self._peers.tell(failure.to_word())
        self._known.set()

    # The main thread

    def _on_exception(self, previous: Any, kind: type, value: BaseException, traceback: Any) -> None:
        """`sys.excepthook`: an exception is about to end this process."""
        here = self._cluster.worker_index
        if os.getpid() != self._process:  # forked from the worker's
            previous(kind, value, traceback)
            return
        is_collective = isinstance(value, _COLLECTIVE_ERRORS) and not is_of_python(value)
        failure = self._cause() if is_collective else self._failure
        if failure is None:
            self._raised = True
            is_of_program = not is_collective and kind is not KeyboardInterrupt
            failure = Failure(here, f"raised {first_line(value)}", is_of_program)
            self._learn(failure)
        if self._raised:
            previous(kind, value, traceback)
        else:
            failure.say(self._cluster)

    def _cause(self) -> Failure | None:
        """Returns why a collective has failed: what another worker has said, or who does not answer."""
        start = time.monotonic()
        while (passed := time.monotonic() - start) < self._peer_timeout + 5:
            if self._known.wait(1.0):
                break
            if passed > _CAUSE_SECONDS and all(coordination.is_reachable(task) for _, task in self._cluster.others()):
                break
        return self._failure

    def _at_exit(self) -> None:
        """All leave together, and the chief, who hosts the store, last: or others would take their end for a failure."""
        if os.getpid() != self._process:
            return
        self._is_ending = True
        failure = self._failure
        if failure is None:
            self._peers.tell({"ended": True})
            # Others may still fetch from this process what the last collective has sent them.
            end = time.monotonic() + (_LAST_SECONDS if self._cluster.is_chief else _ENDED_SECONDS)
            while self._peers.indices() - set(self._ended) and time.monotonic() < end:
                time.sleep(0.05)
        elif not self._raised:
            end_process(self._exit_code(failure))

    def _exit_code(self, failure: Failure) -> int:
        return 1 if failure.worker_index == self._cluster.worker_index else errors.PEER_FAILED_EXIT_CODE
