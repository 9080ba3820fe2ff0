"""The one line of an error that says what happened and where, which other workers receive.

The errors of TensorFlow's graphs begin with titles, traces and names of nodes, and those of Keras with the layer that was called;
an error of Python inside a graph (`tf.py_function`, `Dataset.from_generator`) comes as one of TensorFlow's.
"""

import itertools
import pathlib
import re
import traceback as tracebacks
from collections.abc import Callable
from types import TracebackType

import keras
import tensorflow as tf

_LONGEST = 500  # characters

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_AROUND = re.compile(
    r"\{\{function_node [^}]*\}\}|\[Op:[^\]]*\]( name:.*)?$|"
    r"Error in user-defined function passed to \S+ transformation with iterator: \S+: "
)
_ROOT = re.compile(r"^\((\d+)\) ([A-Z_]+): *")
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_FILE = re.compile(r'^File "([^"]+)", line (\d+)')
_PYTHON = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Iteration|Warning)\b")
_LAYER = re.compile(r"^Exception encountered when calling (.+?)\.?$")
_SAYS_NOTHING = re.compile(
    r"Graph execution error|Detected at node|File \"|<stack traces|Stack trace for op|Traceback \(most|\d+ root error|\[\[|"
    r"Exception encountered when calling"
)
# A graph fails at several places at once; these are what the others do when one has failed.
_FOLLOW = ("CANCELLED", "ABORTED")
_LIBRARIES = [str(pathlib.Path(module.__file__).parent) + "/" for module in (tf, keras)]
_LIBRARIES += [str(pathlib.Path(__file__).parents[1]) + "/"]


def first_line(value: BaseException) -> str:
    """Returns "ValueError: what happened (train.py, line 12)" of an exception, on one line; the place is the user's last."""
    kind, traceback = type(value), value.__traceback__
    lines = _lines(value)
    start = _start(lines)
    said = _said(lines[start:])
    if not said:
        return _shortened(kind.__name__, _of_user(traceback))
    if is_of_python(value):
        return _shortened(said, _of_python(lines[start:]))
    where = _of_part(_LAYER.match, lines) or _of_part(_NODE.search, lines[start:]) or _of_user(traceback)
    return _shortened(f"{kind.__name__}: {said}", where)


def is_of_python(value: BaseException) -> bool:
    """Whether `value` is TensorFlow's error for one that Python code raised inside a graph: no other worker's doing."""
    lines = _lines(value)
    return isinstance(value, tf.errors.OpError) and bool(_PYTHON.match(_said(lines[_start(lines) :])))


def _lines(value: BaseException) -> list[str]:
    return [_AROUND.sub("", line.strip()).strip() for line in _COLOURS.sub("", str(value)).splitlines()]


def _start(lines: list[str]) -> int:
    """Returns where the words begin of the first place that has failed by itself."""
    roots = [(number, found[2]) for number, found in enumerate(map(_ROOT.match, lines)) if found]
    own = [number for number, code in roots if code not in _FOLLOW]
    return next(iter(own or [number for number, _ in roots]), 0)


def _said(lines: list[str]) -> str:
    """Returns the first line that says something; one that ends in a colon goes on with the next."""
    said = ""
    for line in lines:
        if line and not _SAYS_NOTHING.match(line):
            said = f"{said} {_ROOT.sub('', line)}".lstrip()
            if not said.endswith(":"):
                break
    return said


def _of_python(lines: list[str]) -> str:
    """Returns the place of an error that Python has raised inside a graph: the last of the trace."""
    trace = itertools.takewhile(lambda line: not line.startswith("[["), lines)
    places = [f"{found[1]}, line {found[2]}" for found in map(_FILE.match, trace) if found]
    return places[-1] if places else ""


def _of_part(find: Callable[[str], re.Match[str] | None], lines: list[str]) -> str:
    """Returns "in ..." with the layer or node that `find` finds first."""
    return next((f"in {found[1]}" for found in map(find, lines) if found), "")


def _of_user(traceback: TracebackType | None) -> str:
    frames = [frame for frame in tracebacks.extract_tb(traceback) if not frame.filename.startswith((*_LIBRARIES, "<"))]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _shortened(what: str, where: str) -> str:
    what = what.rstrip(".") if len(what) <= _LONGEST else f"{what[:_LONGEST]}..."
    return f"{what} ({where})" if where else what
