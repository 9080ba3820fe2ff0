"""Exemptions from the order that TensorFlow gives operations with side effects.

The names are private to TensorFlow: tests/test_private_names.py fails when they change.
"""

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import control_flow_ops


def exempt_from_automatic_order(operations: Sequence[tf.Operation]) -> None:
    """Lets `operations` with side effects (`Print`, `Assert`, `Empty`) run when their inputs are there, in any order.

    TensorFlow chains such operations in the order of tracing, one rank after the other, although ranks may wait for each other:
    an assertion of the second rank for one of the first, which reads what that rank is sent by the second. It exempts what is
    in a control flow context, and so these get one, which means nothing.
    """
    for operation in operations:
        is_chained = auto_control_deps.op_is_stateful(operation) and operation._control_flow_context is None  # noqa: SLF001
        if is_chained and not any(tensor.dtype == tf.resource for tensor in operation.inputs):
            operation._set_control_flow_context(_NO_CONTROL_FLOW)  # noqa: SLF001


class _NoControlFlow(control_flow_ops.ControlFlowContext):
    def to_control_flow_context_def(self, context_def: object, export_scope: str | None = None) -> None:
        """Nothing is to be said of it."""


_NO_CONTROL_FLOW = _NoControlFlow()
