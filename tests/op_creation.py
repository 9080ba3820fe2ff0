"""What TensorFlow does for every operation it traces, and no test looks at: a fifth of a trace.

* It attaches Python's stack, which the message of a failing step ends with. Here operations have none, as a loaded graph's.
* It looks for the resources that an operation touches. One without a resource or a variant among its inputs touches none, which
  TensorFlow finds out by way of an exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.util import tf_stack

_resources_of = auto_control_deps._get_resource_inputs
_WITH_RESOURCES = (tf.resource, tf.variant)
_extract_stack, _set_stack = tf_stack.extract_stack, pywrap_tf_session.TF_SetOpStackTrace


def _resources_if_any(operation: tf.Operation) -> Iterable[Any]:
    return _resources_of(operation) if any(x.dtype in _WITH_RESOURCES for x in operation.inputs) else ()


def simplify() -> None:
    """For the rest of this process."""
    tf_stack.extract_stack = lambda stacklevel=1: None
    pywrap_tf_session.TF_SetOpStackTrace = lambda operation, stack: None
    auto_control_deps._get_resource_inputs = _resources_if_any


@contextlib.contextmanager
def with_stacks() -> Iterator[None]:
    """A block whose operations know who has made them."""
    tf_stack.extract_stack, pywrap_tf_session.TF_SetOpStackTrace = _extract_stack, _set_stack
    try:
        yield
    finally:
        simplify()
