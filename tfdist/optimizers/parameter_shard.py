"""A rank's part of a replicated parameter, dressed as a variable for the optimizer (stages 1 and 2)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.sharding import Layout, packing


class ParameterShard(tf.__internal__.types.Tensor):
    """What `Optimizer.update_step` gets instead of a parameter whose slots are sharded.

    It reads as this rank's flat shard of the full local parameter; assignments are noted, not stored: when the step is over,
    `value()` is gathered from all ranks and the whole parameter is assigned. No memory is held between steps.

    Args:
        parameter: the distributed variable, replicated over data.
        local: its component on this rank, full size.
        layout: the layout of its optimizer slots.
        data_rank: this rank's data coordinate.
    """

    def __init__(self, parameter: tf.Variable, local: tf.Variable, layout: Layout, data_rank: int):
        self._parameter = parameter
        self._value = packing.cut_shard(local.read_value(), layout, data_rank)
        self.layout = layout
        self.local = local

    # What Keras optimizers ask of a variable

    def _distributed_container(self) -> tf.Variable:
        """The variable by which the optimizer finds its slots (`TFOptimizer._var_key`)."""
        return self._parameter

    @property
    def name(self) -> str:
        return self._parameter.name

    @property
    def dtype(self) -> tf.DType:
        return self._value.dtype

    @property
    def shape(self) -> tf.TensorShape:
        return self._value.shape

    def value(self) -> tf.Tensor:
        return self._value

    read_value = value

    def assign(self, value: Any) -> ParameterShard:
        self._value = tf.ensure_shape(tf.convert_to_tensor(value, self.dtype), self.shape)
        return self

    def assign_add(self, delta: Any) -> ParameterShard:
        return self.assign(self._value + delta)

    def assign_sub(self, delta: Any) -> ParameterShard:
        return self.assign(self._value - delta)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._value, dtype, name=name)


def _delegate(operator: str):
    def apply(self: ParameterShard, *others: Any) -> tf.Tensor:
        return getattr(self._value, operator)(*others)

    apply.__name__ = operator
    return apply


_OPERATORS = """
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __abs__
    __lt__ __le__ __gt__ __ge__ __getitem__
"""

for _operator in _OPERATORS.split():
    setattr(ParameterShard, _operator, _delegate(_operator))
