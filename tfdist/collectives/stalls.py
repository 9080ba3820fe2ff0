"""A step on one machine that never ends is ended: of what no proof sees, such as Python code of one rank that never returns.

    a call of a step ── no processor is used for `step_timeout_seconds`
                     ── it holds the mutex of `exclusion`, so it waits for no data
                     ── collectives fail, and the call raises; if it does not, the process is ended

Over several workers `runtime.failure_watch` does this.
"""

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import exclusion, finished_graphs
from tfdist.graphs.calls import around_calls
from tfdist.runtime import coordination
from tfdist.runtime.failure import end_process
from tfdist.runtime.standing import where_beside

_SURE_SECONDS, _GRACE_SECONDS = 5.0, 10.0
_BUSY = 0.05  # of a processor: a process that uses more goes on


@dataclasses.dataclass(eq=False)
class _Call:
    """A call that is under way, and how often in a row the watch has found that the process has used less than `_BUSY`.

    Looks count, not seconds: a process that was stopped (SIGSTOP, a laptop asleep) has not waited.
    """

    graph: weakref.ref[tf.Graph]  # which holds what the function has captured: a model
    timeout_seconds: float
    looks: int = 0
    used: float = dataclasses.field(default_factory=time.process_time)
    ended_by: str = ""


_calls: list[_Call] = []


def end_at_calls(graph: tf.Graph, timeout_seconds: float) -> None:
    """Has each call of the step that is traced in `graph` end when it waits for so long."""
    here = weakref.ref(graph)

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        _start(os.getpid())
        call = _Call(here, timeout_seconds)
        _calls.append(call)
        try:
            yield
        except tf.errors.OpError as error:
            if call.ended_by:
                raise RuntimeError(call.ended_by) from error
            raise
        finally:
            _calls.remove(call)

    around_calls(watched, key=("stalls", here))


@functools.cache
def _start(process: int) -> None:
    threading.Thread(target=_watch, name=f"tfdist stalls {process}", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(1)
        for call in list(_calls):
            call.looks += 1
            is_idle = time.process_time() - call.used <= _BUSY * call.looks
            if is_idle and call.looks > call.timeout_seconds and _waits_for_nothing(call):
                _end(call)
            elif not is_idle or call.looks > call.timeout_seconds:
                call.looks, call.used = 0, time.process_time()


def _waits_for_nothing(call: _Call) -> bool:
    """Whether a call that has been idle for so long has its data, and is idle still."""
    used = time.process_time()
    return not exclusion.is_free(_SURE_SECONDS) and time.process_time() - used <= _BUSY * _SURE_SECONDS and call in _calls


def _end(call: _Call) -> None:
    if (graph := call.graph()) is None:
        return  # it is over
    beside = where_beside()
    call.ended_by = errors.message(
        f"A step has waited for {call.timeout_seconds:.0f} s (`step_timeout_seconds`), and used no processor: its devices wait "
        f"for each other, or for code that does not return{finished_graphs.what_waits(graph)}"
        f"{f'. A thread is at {beside}' if beside else ''}.",
        fix="Mend that, and start the program again: collectives of this process fail from here on.",
    )
    coordination.abort_collectives(call.ended_by)
    time.sleep(_GRACE_SECONDS)
    if call in _calls:
        print(f"tfdist: {call.ended_by}", file=sys.stderr, flush=True)
        end_process(1)
