"""Variables that no rank stores a mere part of: TensorFlow's own kinds, with a layout as every variable has.

Note: identity. A variable that is not sharded stays a `MirroredVariable`, and one that ranks add up stays a `SyncOnReadVariable`,
since TensorFlow, Keras and users' code test for these classes (Keras's own tests for the name, too). This file is the one
exception to a variable being a `ShardedVariable`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import values
from tensorflow.python.trackable import base as trackable

from tfdist.mesh import DeviceMesh
from tfdist.sharding.layout import Layout
from tfdist.sharding.placements import Partial, Placement, Replicate

_Variable: Any = object  # what it is mixed into


class _WithLayout(_Variable):
    """The part that both kinds share: a layout, which copies keep."""

    layout: Layout

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        copied.layout = self.layout
        return copied


class ReplicatedMirroredVariable(_WithLayout, values.MirroredVariable):
    """A variable of which every rank stores all."""

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> tf.Operation:
        """Restores every rank's copy, also in a rank's step, where a variable may be made that a checkpoint was read for."""
        full = restored_tensors[trackable.VARIABLE_VALUE_KEY]
        return tf.group(*[component.assign(full) for component in self._values])


class PartialSyncOnReadVariable(_WithLayout, values.SyncOnReadVariable):
    """A variable of which every rank stores a value of its own, added up (or averaged) when it is read outside replicas.

    Metrics' totals are, and gradients that are accumulated before they are reduced.
    """

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> tf.Operation:
        """Restores every rank's summand, wherever it is called: they add up to what was saved."""
        full = restored_tensors[trackable.VARIABLE_VALUE_KEY]
        is_sum = self.aggregation == tf.VariableAggregation.SUM
        summand = tf.cast(full / self.distribute_strategy.num_replicas_in_sync, self.dtype) if is_sum else full
        return tf.group(*[component.assign(summand) for component in self._values])


def with_layout(variable: tf.Variable, mesh: DeviceMesh) -> tf.Variable:
    """Returns a variable that TensorFlow has made as one that has a layout; one whose shape is not known is left alone."""
    if not variable.shape.is_fully_defined():
        return variable
    kinds: dict[type, tuple[type, Placement]] = {
        values.MirroredVariable: (ReplicatedMirroredVariable, Replicate()),
        values.SyncOnReadVariable: (PartialSyncOnReadVariable, Partial()),
    }
    if type(variable) in kinds:
        variable.__class__, data = kinds[type(variable)]
        variable.layout = Layout(tuple(variable.shape.as_list()), mesh, data=data)
    return variable
