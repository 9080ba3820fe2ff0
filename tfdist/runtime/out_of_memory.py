"""What is added to TensorFlow's error when a step runs out of a device's memory. Who can tell more says so here: the planner."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import errors

Explainer = Callable[[Any, BaseException], str | None]

_explainers: list[Explainer] = []


def explained_by(explainer: Explainer) -> Explainer:
    """A decorator: from now on `explainer(function, error)` says what filled the memory. None: nothing is known of it.

    `function` is what was being run: a function, a `tf.function` or a method. It may take seconds: only a step that fails has it.
    """
    _explainers.append(explainer)
    return explainer


def explain(function: Any, error: BaseException) -> None:
    """Adds to an error what the explainers say of it, as notes, which Python prints below its message. It never raises.

    An error that has passed here before stays as it is.
    """
    if not isinstance(error, tf.errors.ResourceExhaustedError) or getattr(error, "__notes__", None):
        return
    for explainer in _explainers:
        try:
            said = explainer(function, error)
            if said:
                error.add_note(said)
        except Exception as failure:  # what has happened matters more than why it cannot be explained
            error.add_note(errors.message(f"What filled the memory cannot be told: {type(failure).__name__}: {failure}"))
