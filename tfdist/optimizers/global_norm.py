"""The norm of the reduced gradient, for custom training loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import current_program
from tfdist.optimizers.clipping import norm_of
from tfdist.optimizers.step import reduce_gradients
from tfdist.optimizers.target import variable_of
from tfdist.sharding import config_of


def global_norm(grads: Sequence[Any], variables: Sequence[Any]) -> tf.Tensor:
    """Returns the L2 norm of the gradient of the global batch, for custom training loops.

    Call it on every rank, in the function given to `strategy.run`, with the gradients as they left the tape. At stages 0 to 2
    they are reduced for it; `optimizer.apply` called with the same gradients takes the reduced ones and does not reduce again.
    At stage 3 they are reduced already. One message of one number is added (none at stage 0).

    Under any other strategy, or none, it is `tf.linalg.global_norm(grads)`.

    Args:
        grads: gradients, one per variable; None is skipped.
        variables: the variables, of Keras or TensorFlow.

    Returns:
        A scalar, float32 (float64 if a gradient is), the same on all ranks.

    Raises:
        RuntimeError: called outside `strategy.run`.
        ValueError: the two have different lengths.
    """
    pairs = [(grad, variable) for grad, variable in zip(grads, variables, strict=True) if grad is not None]
    config = config_of(tf.distribute.get_strategy())
    if config is None:
        return tf.linalg.global_norm([grad for grad, _ in pairs])
    program = current_program("`global_norm`")
    reduced = reduce_gradients([grad for grad, _ in pairs], [variable for _, variable in pairs], config, program)
    layouts = [config.slot_layout(variable_of(variable).layout) for _, variable in pairs]
    with tf.device(program.device):
        return norm_of(reduced, layouts, config, program)
