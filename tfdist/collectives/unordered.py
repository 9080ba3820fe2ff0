"""Operations with side effects whose order does not matter.

The names are private to TensorFlow: tests/test_private_names.py fails when they change.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import control_flow_ops


def leave_unordered(operations: Sequence[tf.Operation]) -> None:
    """Lets those with side effects (`Print`, `Assert`, `Empty`) run when their inputs are there, not in the order of tracing.

    TensorFlow chains them so when a function has been traced, ranks one after the other, and ranks may wait for each other. It
    leaves alone what is in a control flow context: here, one that means nothing.
    """
    for operation in operations:
        is_chained = auto_control_deps.op_is_stateful(operation) and operation._control_flow_context is None  # noqa: SLF001
        if is_chained and not any(tensor.dtype == tf.resource for tensor in operation.inputs):
            operation._set_control_flow_context(_NO_CONTROL_FLOW)  # noqa: SLF001


class _NoControlFlow(control_flow_ops.ControlFlowContext):
    def to_control_flow_context_def(self, context_def: object, export_scope: str | None = None) -> None:
        """Nothing is to be said of it."""


_NO_CONTROL_FLOW = _NoControlFlow()
