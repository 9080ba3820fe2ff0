"""The note of TensorFlow's error when a step runs out of a device's memory: the planner's knowledge of the model."""

import importlib
from typing import Any

import tensorflow as tf

from tfdist import errors

_EXPLAINS = "tfdist.tools.planning.out_of_memory"  # a tool: imported by a step that has failed only


def explain(function: Any, error: BaseException) -> None:
    """Adds to an error what filled the memory, as a note, which Python prints below its message. It never raises.

    `function` is what was being run: a function, a `tf.function` or a method. An error that has been here before stays as it is.
    """
    if not isinstance(error, tf.errors.ResourceExhaustedError) or getattr(error, "__notes__", None):
        return
    try:
        said = importlib.import_module(_EXPLAINS).explanation(function, error)
        if said:
            error.add_note(said)
    except Exception as failure:  # what has happened matters more than why it cannot be explained
        error.add_note(errors.message(f"What filled the memory cannot be said: {type(failure).__name__}: {failure}"))
