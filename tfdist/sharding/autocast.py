"""Where Keras casts a variable after it has read it: a sharded one is cast before it travels, in half the bytes.

The name is private to Keras: tests/test_private_names.py fails when it changes.

    AutocastScope.maybe_cast    reads a variable in the dtype in which its layer computes
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.common.variables import AutocastScope

from tfdist.override import override
from tfdist.sharding.variable import ShardedVariable


@override("maybe_cast", AutocastScope)
def _maybe_cast(original: Callable[..., Any], self: Any, value: Any) -> Any:
    if isinstance(value, ShardedVariable) and self.dtype is not None and value.dtype.is_floating:
        return value.cast_read(tf.as_dtype(self.dtype))
    return original(self, value)
