"""The questions of an executor to the step whose actions it runs: neither order, nor transport, nor gradients."""

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.extensions.pipeline.microbatches import Microbatches
from tfdist.extensions.pipeline.schedules.schedule import Schedule
from tfdist.extensions.pipeline.stages.stage import StageLayer
from tfdist.extensions.pipeline.stages.staged_model import StagedModel


class Work(Protocol):
    """A step, as `step.Step` says."""

    model: Any
    staged: StagedModel
    program: RankProgram | None
    schedule: Schedule
    data: Microbatches
    training: bool

    def input_specs(self, stage: StageLayer, microbatch: int) -> list[tf.TensorSpec]: ...

    def annotate(self, stage: StageLayer, microbatch: int, stage_inputs: Sequence[tf.Tensor]) -> None: ...

    def losses(
        self, stage: StageLayer, microbatch: int, stage_inputs: Sequence[tf.Tensor], stage_outputs: list[tf.Tensor]
    ) -> list[tf.Tensor]: ...

    def upstream(self, microbatch: int) -> list[tf.Tensor]: ...

    def observe(self, stage_index: int, microbatch: int, stage_outputs: list[tf.Tensor], losses: list[tf.Tensor]) -> None: ...

    def scale(self, loss: tf.Tensor) -> tf.Tensor: ...
