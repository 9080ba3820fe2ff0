"""What travels in fewer bytes in a step: the core's questions, answered."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import Communicator, RankProgram
from tfdist.collectives.plan import Ranks
from tfdist.extensions.compression import compressed, exact_shards
from tfdist.extensions.compression.error_feedback import ErrorFeedback
from tfdist.extensions.compression.names import compressor_of
from tfdist.extensions.compression.residuals import keep_residuals_of, refuse_two_sums
from tfdist.sharding.compression import Compressor, NoCompression
from tfdist.sharding.shard_messages import SumOfGradients


class Compressing(NoCompression):
    """Gradients and parameters travel as the settings of their strategy say."""

    def compressor_of(self, argument: str, value: Any) -> Compressor | None:
        return compressor_of(argument, value)

    def check_it_pays(self, communicator: Communicator, compressor: Compressor, setting: dict[str, Any]) -> None:
        compressed.check_it_pays(communicator, compressor, setting)

    def reduce_scatter(self, message: Any, rows: Sequence[tf.Tensor], ranks: Ranks, dtype: tf.DType) -> list[tf.Tensor]:
        return _summed(message, compressed.reduce_scatter, rows, ranks, message.label, dtype)

    def all_reduce(self, message: Any, parts: Sequence[tf.Tensor], ranks: Ranks, label: str, dtype: tf.DType) -> list[tf.Tensor]:
        return _summed(message, compressed.all_reduce, parts, ranks, label, dtype)

    def all_gather(
        self, program: RankProgram, parts: Sequence[tf.Tensor], compressors: Sequence[Compressor], ranks: Ranks, label: str
    ) -> list[tf.Tensor]:
        return compressed.all_gather(program, parts, compressors, ranks, label)

    def gather_differences(
        self, program: RankProgram, shards: Sequence[tf.Tensor], variables: Sequence[Any], label: str, config: Any
    ) -> list[Any]:
        return exact_shards.gather_differences(program, shards, variables, label, config)

    def encoded(self, program: RankProgram) -> list[tf.Operation]:
        return program.attachment(ErrorFeedback).encoded

    def keep_losses(self, program: RankProgram, variables: Sequence[Any]) -> None:
        program.attachment(ErrorFeedback).write(variables)

    def keep_state(self, optimizer: Any, variables: Sequence[Any], config: Any, accumulates_partial_sums: bool) -> None:
        exact_shards.keep_exact_shards_of(optimizer, variables, config)
        keep_residuals_of(optimizer, variables, config, accumulates_partial_sums)

    def refuse_two_sums(self, config: Any) -> None:
        refuse_two_sums(config)

    def complete_copies(self, variables: Iterable[Any]) -> None:
        exact_shards.complete_copies(variables)


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
    feedback: ErrorFeedback = program.attachment(ErrorFeedback)
    sums, words, losses = send(program, feedback.added(variables, parts, compressors), compressors, ranks, label)
    feedback.note(variables, losses, words)
    return [tf.cast(total, dtype) for total in sums]
