"""Keras 2 (`tf_keras`), which tfdist does not know: what it does with losses and gradients under a strategy would be its own."""

import os
import sys
import traceback

from tfdist import errors

_FIX = (
    "Use Keras 3: `import keras` in the place of `tf_keras`, without `TF_USE_LEGACY_KERAS`; or stay with Keras 2 and "
    "`tf.distribute.MirroredStrategy`."
)


def check_environment() -> None:
    """Raises NotImplementedError where `tf.keras` is Keras 2."""
    value = os.environ.get("TF_USE_LEGACY_KERAS", "")
    if value.strip().lower() in ("1", "true"):
        raise errors.not_implemented(
            "tfdist trains models of Keras 3, and `tf.keras` is Keras 2.", TF_USE_LEGACY_KERAS=value, fix=_FIX
        )


def check_caller(name: str | None) -> None:
    """Raises NotImplementedError where Keras 2 makes the variable `name`."""
    callers = traceback.walk_stack(None) if "tf_keras" in sys.modules else ()
    if any((frame.f_globals.get("__name__") or "").partition(".")[0] == "tf_keras" for frame, _ in callers):
        raise errors.not_implemented(
            "A layer, a metric or an optimizer of `tf_keras` (Keras 2) makes a variable under a tfdist strategy.",
            variable=name,
            fix=_FIX,
        )
