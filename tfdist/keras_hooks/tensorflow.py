"""TensorFlow itself: AutoGraph leaves tfdist's code as it is."""

from __future__ import annotations

from typing import Any

from tensorflow.python.autograph.core import config

from tfdist.keras_hooks.table import replaces


@replaces("tensorflow.python.autograph.core.config", "CONVERSION_RULES")
def _conversion_rules(rules: tuple[Any, ...]) -> tuple[Any, ...]:
    """A `tf.function` rewrites the Python of what it calls, library code too unless the library is listed here, as TensorFlow and
    Keras are."""
    return config.DoNotConvert("tfdist"), *rules
