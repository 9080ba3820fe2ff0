"""A tensor, or a variable known by its handle, dressed as the variable that Keras's `update_step` expects."""

import functools
from typing import Any

import tensorflow as tf

from tfdist import errors


class StandIn(tf.__internal__.types.Tensor):
    """A variable to an optimizer's update, in the place of a parameter, or of one of its slots.

    It stands for a shard of a parameter, for the whole of it on its owner, or for several side by side. What is assigned to it is
    only noted, and `value()` returns it: the caller stores or gathers it when the update is over. With a `handle` it is the
    variable of that resource, which is read and assigned at once: a function's own arguments are known so.

    Args:
        variable: the distributed variable, by which the optimizer finds a parameter's slots.
        value: what it reads as; with a handle, only shape and dtype matter.
        path: the path of Keras's variable, which some optimizers choose by (Muon).
        handle: of a resource.
    """

    def __init__(
        self, variable: tf.Variable, value: tf.Tensor | tf.Variable, path: str | None = None, handle: tf.Tensor | None = None
    ):
        self._variable = variable
        self._value = value
        self._path = path
        self._handle = handle

    # What Keras optimizers ask of a variable

    def _distributed_container(self) -> tf.Variable:
        """The variable by which the optimizer finds slots (`TFOptimizer._var_key`)."""
        return self._variable

    @property
    def name(self) -> str:
        return self._variable.name

    @property
    def path(self) -> str:
        return self._path or self._variable.name

    @property
    def dtype(self) -> tf.DType:
        return self._value.dtype

    @property
    def shape(self) -> tf.TensorShape:
        return self._value.shape

    def value(self) -> tf.Tensor:
        if self._handle is None:
            return self._value
        value = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self.dtype)
        value.set_shape(self.shape)
        return value

    read_value = value

    def assign(self, value: Any, **_: Any) -> "StandIn":
        value = tf.convert_to_tensor(value, self.dtype)
        if not value.shape.is_compatible_with(self.shape):
            raise errors.value_error(
                f"The update of {self.name!r} must keep the shard's shape, {self.shape}.",
                shape=value.shape,
                fix="Only elementwise optimizers run on shards.",
            )
        if self._handle is not None:
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)
        else:
            value.set_shape(self.shape)
            self._value = value
        return self

    def assign_add(self, delta: Any, **_: Any) -> "StandIn":
        if self._handle is None:
            return self.assign(self._value + delta)
        tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=tf.convert_to_tensor(delta, self.dtype))  # in place
        return self

    def assign_sub(self, delta: Any, **_: Any) -> "StandIn":
        if self._handle is None:
            return self.assign(self._value - delta)
        tf.raw_ops.AssignSubVariableOp(resource=self._handle, value=tf.convert_to_tensor(delta, self.dtype))
        return self

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.value(), dtype, name=name)


def _of_value(self: "StandIn", operator: str, *others: Any) -> tf.Tensor:
    return getattr(self.value(), operator)(*others)


_OPERATORS = """
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __abs__
    __lt__ __le__ __gt__ __ge__ __getitem__
"""

for _operator in _OPERATORS.split():
    setattr(StandIn, _operator, functools.partialmethod(_of_value, _operator))
