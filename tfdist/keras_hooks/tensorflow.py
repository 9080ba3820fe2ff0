"""TensorFlow itself: AutoGraph leaves tfdist's code as it is, and the seeds of random operations are those of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorflow.python.autograph.core import config

from tfdist.keras_hooks.table import replaces
from tfdist.layers import randomness


@replaces("tensorflow.python.autograph.core.config", "CONVERSION_RULES")
def _conversion_rules(rules: tuple[Any, ...]) -> tuple[Any, ...]:
    """A `tf.function` rewrites the Python of what it calls, library code too unless the library is listed here, as TensorFlow and
    Keras are."""
    return config.DoNotConvert("tfdist"), *rules


@replaces("tensorflow.python.framework.random_seed", "get_seed")
def _get_seed(original: Callable[..., Any], op_seed: Any) -> Any:
    """TensorFlow counts a graph's random operations, the ranks' one after the other: workers would draw the same numbers as each
    other, tensor peers different ones."""
    return randomness.op_seeds(lambda: original(op_seed))
