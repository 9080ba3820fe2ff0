"""The lines of Python that run: who has asked for an eager operation, and who reads the numbers of an eager tensor."""

import sys
import traceback
from types import FrameType

_WATCHING = ("tfdist.placements.eager", "tfdist.graphs.", "contextlib")
_READING = ("__array__", "__bool__", "__float__", "__int__", "numpy")  # methods of eager tensors
_PRINTING = ("__format__", "__repr__", "__str__", "numpy_text")
_CARRYING_OUT = ("keras.src.backend.", "keras.src.ops.", "tensorflow.", "tfdist.")  # what a caller has asked for
_ROOMS = ("tensorflow", "keras", "tfdist", "threading", "contextlib")


def line_that_runs(frame: FrameType | None = None) -> tuple[str, bool]:
    """Returns " (file, line)" of the user's code that runs here, or in `frame`, "" where that is not known; and whether it, or
    Keras, has asked for the operation: no tfdist, nor a `tf.custom_gradient`, which would go back along what it was given."""
    frame = frame or sys._getframe(1)
    line, is_users = "", None
    while frame is not None:
        name, code = frame.f_globals.get("__name__") or "", frame.f_code
        room = name.partition(".")[0]
        if is_users is None and room != "tensorflow" and not name.startswith(_WATCHING):
            is_users = room != "tfdist"
        if is_users is not None and not line and room not in _ROOMS:
            line = f" ({code.co_filename}, line {frame.f_lineno})"
        if name.endswith("ops.custom_gradient") and code.co_name == "_eager_mode_decorator":
            is_users = False
        frame = frame.f_back
    return line, bool(is_users)


def is_asked_by_keras() -> bool:
    """Whether Keras's own code, a layer or a loss, has called the function of Keras's operations that runs here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_globals.get("__name__") or "").startswith(_CARRYING_OUT):
        frame = frame.f_back
    return frame is not None and (frame.f_globals.get("__name__") or "").startswith("keras.")


def reader_of_numbers() -> FrameType | None:
    """Returns the frame of what computes with the numbers of an eager tensor whose method runs here; None: it is only printed, or
    TensorFlow looks at a size, or lets an assertion fail."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in _READING:
        if frame.f_code.co_name in _PRINTING:
            return None
        frame = frame.f_back
    reader = None if frame is None else frame.f_back
    if frame is None or reader is None:
        return None
    name = reader.f_globals.get("__name__") or ""
    is_of_tensorflow = name.startswith("tensorflow.") and not name.endswith("script_ops")
    is_size = is_of_tensorflow and frame.f_code.co_name in ("numpy", "__array__")
    return None if is_size or name.endswith("check_ops") else reader


def tokens_here() -> set[str]:
    """Returns TensorFlow's tokens of the Python code (`tf.py_function`) that runs in this thread, if any does."""
    frames = [one for one, _ in traceback.walk_stack(None) if (one.f_globals.get("__name__") or "").endswith("ops.script_ops")]
    return {one.f_locals["token"] for one in frames if "token" in one.f_locals}
