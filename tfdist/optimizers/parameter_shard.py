"""A rank's part of a parameter, dressed as a variable for the optimizer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import errors


class ParameterShard(tf.__internal__.types.Tensor):
    """What `Optimizer.update_step` gets instead of a parameter whose slots are sharded, or live on one rank.

    It reads as `value`, this rank's flat shard (or, on its owner, the whole); assignments are noted, not stored: when the step is
    over, `value()` is stored in the rank's component (stage 3), or gathered from all ranks and stored in the whole parameter
    (stages 1 and 2).

    Args:
        parameter: the distributed variable.
        value: this rank's shard, (L,), or the whole parameter.
        path: the Keras variable's path, which some optimizers choose by (Muon).
    """

    def __init__(self, parameter: tf.Variable, value: tf.Tensor, path: str | None = None):
        self._parameter = parameter
        self._value = value
        self._path = path

    def with_value(self, value: tf.Tensor) -> ParameterShard:
        """Returns the same parameter's shard, reading as `value`."""
        return ParameterShard(self._parameter, value, self._path)

    # What Keras optimizers ask of a variable

    def _distributed_container(self) -> tf.Variable:
        """The variable by which the optimizer finds its slots (`TFOptimizer._var_key`)."""
        return self._parameter

    @property
    def name(self) -> str:
        return self._parameter.name

    @property
    def path(self) -> str:
        return self._path or self._parameter.name

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
        value = tf.convert_to_tensor(value, self.dtype)
        if not value.shape.is_compatible_with(self.shape):
            raise ValueError(
                errors.message(
                    f"The update of {self.name!r} must keep the shard's shape, {self.shape}.",
                    shape=value.shape,
                    fix="Only elementwise optimizers run on shards.",
                )
            )
        value.set_shape(self.shape)
        self._value = value
        return self

    def assign_add(self, delta: Any) -> ParameterShard:
        return self.assign(self._value + delta)

    def assign_sub(self, delta: Any) -> ParameterShard:
        return self.assign(self._value - delta)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._value, dtype, name=name)


def parameter_shard(optimizer: Any, variable: tf.Variable, value: tf.Tensor) -> ParameterShard:
    """Returns `variable`, one that `optimizer` was built with, reading as `value`."""
    own = optimizer._trainable_variables[optimizer._get_variable_index(variable)]
    return ParameterShard(variable, value, getattr(own, "path", None))


def update_shard(optimizer: Any, shard: tf.Variable | ParameterShard, grad: tf.Tensor, learning_rate: tf.Tensor) -> None:
    """Weight decay and the Keras optimizer's own update, on whatever part of a parameter this rank steps."""
    # Not before the gradient is there: the decay alone, as large as the parameter, would lie in memory from the step's begin.
    with tf.control_dependencies([grad]):
        optimizer._apply_weight_decay([shard])
        optimizer.update_step(grad, shard, learning_rate)


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
