"""The norm of the reduced gradient, and its clipping, for a custom `train_step` or training loop."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.optimizers.clipping import global_factor, norm_of
from tfdist.optimizers.step import reduce_gradients, stepping_program
from tfdist.optimizers.target import variable_of
from tfdist.sharding import MeshConfig, config_of
from tfdist.sharding.known_sums import KnownSums
from tfdist.sharding.tape_gradients import TapeGradients


def global_norm(grads: Sequence[Any], variables: Sequence[Any]) -> tf.Tensor:
    """Returns the L2 norm of the gradient of the global batch, for a custom `train_step` or training loop.

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
    return _reduced_and_norm(pairs, config, stepping_program("`global_norm`"))[1]


def clip_by_global_norm(grads: Sequence[Any], variables: Sequence[Any], clip_norm: Any) -> tuple[list[Any], tf.Tensor]:
    """Clips the gradient of the global batch by its norm, for a custom `train_step` or training loop.

    It stands in the place of `tf.clip_by_global_norm`, which wants whole gradients on every rank, and in eager steps at stages 0
    to 2 would clip each rank's own:

        grads, norm = tfdist.clip_by_global_norm(grads, variables, 1.0)
        optimizer.apply(grads, variables)

    Call it on every rank, in the function given to `strategy.run`, with the gradients as they left the tape. It costs what
    `global_norm` does; `optimizer.apply` does not reduce what it returns again. The mistake to avoid: computing with the
    gradients that it returns, which may be shards. Where the optimizer can clip itself, `global_clipnorm=1.0` is the shorter way.

    Under any other strategy, or none, it is `tf.clip_by_global_norm(grads, clip_norm)`.

    Args:
        grads: gradients, one per variable; None stays None.
        variables: the variables, of Keras or TensorFlow.
        clip_norm: the largest norm, a number or a scalar.

    Returns:
        The clipped gradients, for `optimizer.apply` with the same variables, and the norm before clipping, a scalar: NaN, and so
        are the gradients, where it is not finite.

    Raises:
        RuntimeError: called outside `strategy.run`.
        ValueError: the two have different lengths.
    """
    pairs = [(grad, variable) for grad, variable in zip(grads, variables, strict=True) if grad is not None]
    config = config_of(tf.distribute.get_strategy())
    if config is None:
        return tf.clip_by_global_norm(list(grads), clip_norm)
    program = stepping_program("`clip_by_global_norm`")
    reduced, norm = _reduced_and_norm(pairs, config, program)
    known, clipped = program.part(KnownSums), []
    with tf.device(program.device):
        factor = global_factor(norm, clip_norm)
        for grad, (_, variable) in zip(reduced, pairs, strict=True):
            clipped.append(grad * tf.cast(factor, grad.dtype))
            known.note(clipped[-1], clipped[-1], is_returned=True)
            if not program.is_eager and not config.slot_layout(variable_of(variable).layout).is_data_sharded:
                program.part(TapeGradients).note_whole(clipped[-1])
    each = iter(clipped)
    return [None if grad is None else next(each) for grad in grads], norm


def _reduced_and_norm(
    pairs: Sequence[tuple[Any, Any]], config: MeshConfig, program: RankProgram
) -> tuple[list[tf.Tensor], tf.Tensor]:
    reduced = reduce_gradients([grad for grad, _ in pairs], [variable for _, variable in pairs], config, program)
    layouts = [config.slot_layout(variable_of(variable).layout) for _, variable in pairs]
    with tf.device(program.device):
        return reduced, norm_of(reduced, layouts, config, program)
