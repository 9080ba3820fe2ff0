"""Where the main thread stands, for a message about a worker that others wait for. No TensorFlow here."""

import functools
import os
import sys
import sysconfig
import threading
import traceback
from types import FrameType
from typing import Any

_LIBRARIES = (
    *{os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep,
)
_TENSORFLOW = f"{os.sep}tensorflow{os.sep}python{os.sep}"


def where_it_stands() -> str:
    """Returns where the main thread is, in the program's own code: "train.py:33, in load"."""
    main, _ = _frames()
    return "its end" if main is None else _place(_own(main) or main)


def where_beside() -> str:
    """Returns where another thread is in the program's own code, as one that reads data, while the main thread is in a call of
    TensorFlow; "" where none is."""
    main, others = _frames()
    if main is None or not _is_in_tensorflow(main):
        return ""
    return next((_place(own) for own in map(_own, others) if own is not None), "")


def both_places(of_worker: dict[str, Any]) -> str:
    """Returns, of a worker that tells where it is "at" and what stands "beside", both in words."""
    at, beside = of_worker["at"], of_worker["beside"]
    return f"{at}, with another thread at {beside}" if beside else str(at)


def main_is_in_tensorflow() -> bool:
    """Whether the main thread runs, or has called, TensorFlow."""
    main, _ = _frames()
    return main is not None and _is_in_tensorflow(main)


def any_is_in_tensorflow() -> bool:
    """Whether the main thread, or another than this one, does."""
    main, others = _frames()
    return any(map(_is_in_tensorflow, others if main is None else [main, *others]))


def _frames() -> tuple[FrameType | None, list[FrameType]]:
    """Returns where the main thread is, None after its end, and where the others are, without this one."""
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident or 0, None)
    frames.pop(threading.get_ident(), None)
    return main, list(frames.values())


def _is_in_tensorflow(frame: FrameType) -> bool:
    return _TENSORFLOW in frame.f_code.co_filename


def _own(frame: FrameType) -> FrameType | None:
    """Returns the innermost frame that is of no library."""
    return next((one for one, _ in traceback.walk_stack(frame) if not _is_library(one.f_code.co_filename)), None)


@functools.cache
def _is_library(path: str) -> bool:
    return os.path.realpath(path).startswith(_LIBRARIES) or path.startswith("<frozen ")


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
