"""Adam's update in place, as one operation of TensorFlow instead of Keras's fifteen.

    m += (g - m) (1 - beta_1);    v += (g^2 - v) (1 - beta_2);    w -= m alpha / (sqrt(v) + epsilon),
    alpha = learning_rate sqrt(1 - beta_2^t) / (1 - beta_1^t)

is what `tf.raw_ops.ResourceApplyAdam` computes and what `keras.optimizers.Adam` does (Kingma and Ba 2015,
https://arxiv.org/abs/1412.6980, the efficient form of section 2), AdamW after its decay. It takes one pass over memory, and
writes to the variables where they are: for those that this rank holds whole, at stage 0, and for its shards at stage 3, unless
XLA compiles their update (`shared_update`).
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.optimizers.variables import local_part, variable_of

_CLASSES = (keras.optimizers.Adam, keras.optimizers.AdamW)
_DTYPES = (tf.float32, tf.float64)


class FusedAdam:
    """The updates of one step on one rank.

    Args:
        optimizer: one that `fits`.
        program: of the rank.
        learning_rate: the step's, a scalar.
    """

    def __init__(self, optimizer: Any, program: RankProgram, learning_rate: tf.Tensor):
        self._optimizer = optimizer
        self._program = program
        self._learning_rate = learning_rate
        self._scalars: dict[tf.DType, dict[str, tf.Tensor]] = {}

    @staticmethod
    def fits(optimizer: Any, variable: tf.Variable) -> bool:
        """Whether the operation is what `optimizer` would do to `variable`."""
        return type(optimizer) in _CLASSES and not optimizer.amsgrad and variable.dtype in _DTYPES

    def update(self, variable: tf.Variable, grad: tf.Tensor, decays: bool) -> None:
        """Updates what this rank stores of a distributed variable, whole or a shard, and of its slots; `grad` has that shape."""
        optimizer, program = self._optimizer, self._program
        stored = local_part(variable, program)
        index = optimizer._get_variable_index(variable)
        slots = [local_part(variable_of(slots[index]), program) for slots in (optimizer._momentums, optimizer._velocities)]
        scalars = self._scalars_in(stored.dtype)
        # Not before the gradient is there: the decay alone, as large as the parameter, would lie in memory from the step's begin.
        with tf.control_dependencies([grad]):
            if decays:
                rate = tf.cast(optimizer.weight_decay, stored.dtype) * scalars["lr"]
                stored.assign_sub(stored.read_value() * rate, read_value=False)
            handles = dict(zip(("var", "m", "v"), (one.handle for one in (stored, *slots)), strict=True))
            tf.raw_ops.ResourceApplyAdam(**handles, **scalars, grad=tf.cast(grad, stored.dtype))

    def _scalars_in(self, dtype: tf.DType) -> dict[str, tf.Tensor]:
        """Returns the operation's scalars, made once a step for all variables."""
        if dtype not in self._scalars:
            optimizer = self._optimizer
            step = tf.cast(optimizer.iterations + 1, dtype)
            betas = {"beta1": optimizer.beta_1, "beta2": optimizer.beta_2}
            # Powers of what `cast` makes of a number, by way of float32, as Keras has them.
            powers = {f"{name}_power": tf.pow(tf.cast(beta, dtype), step) for name, beta in betas.items()}
            constants = {name: tf.constant(value, dtype) for name, value in {**betas, "epsilon": optimizer.epsilon}.items()}
            self._scalars[dtype] = {"lr": tf.cast(self._learning_rate, dtype), **powers, **constants}
        return self._scalars[dtype]
