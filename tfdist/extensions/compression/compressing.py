"""Messages in fewer bytes: the core's questions, answered."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.collectives.plan import Ranks
from tfdist.extensions.compression import compressed, exact_shards
from tfdist.extensions.compression.error_feedback import ErrorFeedback
from tfdist.extensions.compression.names import compressor_of
from tfdist.extensions.compression.residuals import keep_residuals_of, refuse_two_sums
from tfdist.sharding.compression import NoCompression
from tfdist.sharding.shard_messages import SumOfGradients


class Compressing(NoCompression):
    """Gradients and parameters travel as the settings of their strategy say."""

    compressor_of: Any = staticmethod(compressor_of)
    check_it_pays: Any = staticmethod(compressed.check_it_pays)
    all_gather: Any = staticmethod(compressed.all_gather)
    gather_differences: Any = staticmethod(exact_shards.gather_differences)
    complete_copies: Any = staticmethod(exact_shards.complete_copies)
    refuse_two_sums: Any = staticmethod(refuse_two_sums)

    def reduce_scatter(self, message: Any, rows: Sequence[tf.Tensor], ranks: Ranks, dtype: tf.DType) -> list[tf.Tensor]:
        return _summed(message, compressed.reduce_scatter, rows, ranks, message.label, dtype)

    def all_reduce(self, message: Any, parts: Sequence[tf.Tensor], ranks: Ranks, label: str, dtype: tf.DType) -> list[tf.Tensor]:
        return _summed(message, compressed.all_reduce, parts, ranks, label, dtype)

    def encoded(self, program: RankProgram) -> list[tf.Operation]:
        return program.part(ErrorFeedback).encoded

    def keep_losses(self, program: RankProgram, variables: Sequence[Any]) -> None:
        program.part(ErrorFeedback).write(variables)

    def keep_state(self, optimizer: Any, variables: Sequence[Any], config: Any, accumulates_partial_sums: bool) -> None:
        exact_shards.keep_exact_shards_of(optimizer, variables, config)
        keep_residuals_of(optimizer, variables, config, accumulates_partial_sums)


def _summed(
    message: SumOfGradients,
    send: Callable[..., compressed.Sums],
    parts: Sequence[tf.Tensor],
    ranks: Ranks,
    label: str,
    dtype: tf.DType,
) -> list[tf.Tensor]:
    """Returns the sums, as `dtype`, that `send` of `compressed` forms over `ranks` of their `parts`, of float32."""
    program, variables = message.program, message.variables
    compressors = [message.config.compressor_of(variable.layout) for variable in variables]
    names = [variable.name.partition(":")[0] for variable in variables]
    program.plan.gradients[program.rank].update(zip(names, compressors, strict=True))
    feedback = program.part(ErrorFeedback)
    sums, words, losses = send(program, feedback.added(variables, parts, compressors), compressors, ranks, label)
    feedback.note(variables, losses, words)
    return [tf.cast(total, dtype) for total in sums]
