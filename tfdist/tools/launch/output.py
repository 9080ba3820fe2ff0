"""The output of a worker: in whole lines under its name, raw in a file, and its end, for the case that it fails."""

import collections
import re
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

UPDATE_SECONDS = 10.0  # between two states of one progress bar
_LONGEST_LINE = 1 << 16  # bytes; a longer one is cut
_TRACEBACK = "Traceback (most recent call last):"
_TRACEBACK_LINES, _OTHER_LINES = 60, 20
_STOPPED_BY_NAN = "Invalid loss, terminating training"  # what keras.callbacks.TerminateOnNaN prints


def say(text: str) -> None:
    """Prints a line of the launcher's own, on stderr: stdout is the workers'."""
    print(f"tfdist: {text}", file=sys.stderr, flush=True)


class Output:
    """The two streams of one worker, printed with its name before each line if `shown`; their end is kept in any case.

    `file` gets both streams, byte for byte, as they come; the caller closes it.
    """

    def __init__(self, name: str, *, shown: bool = True, file: BinaryIO | None = None):
        self._name = name
        self._shown = shown
        self._file = file
        self._lines = {source: Lines() for source in ("stdout", "stderr")}
        self._last: collections.deque[str] = collections.deque(maxlen=_OTHER_LINES)
        self._traceback: tuple[str, collections.deque[str]] | None = None  # which stream it is on, and its lines
        self.stopped_by_nan = ""  # the line that says that training ended because a loss was no number

    def feed(self, source: str, data: bytes) -> None:
        """Takes the next bytes of "stdout" or "stderr"."""
        if self._file:
            self._file.write(data)
        for line in self._lines[source].feed(data):
            self._take(source, line)

    def end(self, source: str) -> None:
        """Takes the line that was not ended, if any."""
        for line in self._lines[source].end():
            self._take(source, line)

    def last_words(self) -> list[str]:
        """Returns the last traceback with what followed on its stream, at most 60 lines; else the last 20 lines."""
        return list(self._traceback[1] if self._traceback else self._last)

    def _take(self, source: str, line: str) -> None:
        if _TRACEBACK in line:
            self._traceback = source, collections.deque(maxlen=_TRACEBACK_LINES)
        if self._traceback and self._traceback[0] == source:
            self._traceback[1].append(line)
        self._last.append(line)
        if _STOPPED_BY_NAN in line:
            self.stopped_by_nan = line
        if self._shown:
            stream = getattr(sys, source)
            encoding = stream.encoding or "utf-8"
            # The worker may print what the launcher's own terminal cannot.
            text = f"[{self._name}] {line}\n".encode(encoding, "replace").decode(encoding)
            stream.write(text)
            stream.flush()


class Lines:
    """Bytes into lines, as a terminal would show them when the line is complete.

    A progress bar rewrites its line with carriage returns and backspaces, thousands of times: its last state is the line,
    and states in between come as lines of their own, one in `UPDATE_SECONDS` at most.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._rest = b""
        self._shown_at = clock()

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that `data` completes."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        lines = [_last_state(line) for line in complete]
        if lines:
            self._shown_at = self._clock()
        lines += self._update()
        if len(self._rest) > _LONGEST_LINE:
            lines += self.end()
        return lines

    def end(self) -> list[str]:
        """Returns the line that was not ended, if any."""
        rest, self._rest = self._rest, b""
        return [_last_state(rest)] if rest else []

    def _update(self) -> list[str]:
        """Returns the progress bar's state if one is due, and forgets the states before it."""
        earlier, carriage_return, current = self._rest.rpartition(b"\r")
        if not carriage_return:
            return []
        state = _last_state(earlier)
        self._rest = state.encode() + carriage_return + current
        if not state or self._clock() - self._shown_at < UPDATE_SECONDS:
            return []
        self._shown_at = self._clock()
        return [state]


def _last_state(line: bytes) -> str:
    r"""Returns what stands in the line at last: the text after the last "\r" that has any, "\b" taking a character back."""
    *earlier, state = line.decode(errors="replace").split("\r")
    while earlier and not state.strip("\b "):
        state = earlier.pop()
    # After the text they only move the cursor: Keras goes back that way before it writes the next state.
    state = state.rstrip("\b")
    if "\b" not in state:
        return state
    kept = ""
    for run in re.findall(r"[\b]+|[^\b]+", state):
        kept = kept[: max(0, len(kept) - len(run))] if run.startswith("\b") else kept + run
    return kept
