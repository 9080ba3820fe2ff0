"""A Keras model split in stages, and which rank of a pipeline computes which of them."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfdist import errors
from tfdist.extensions.pipeline.schedules.schedule import Schedule
from tfdist.extensions.pipeline.stages.masks import Masks
from tfdist.extensions.pipeline.stages.stage import split_in_stages


class StagedModel:
    """A functional model, built, split in the stages of one schedule, which says which rank computes which stage.

    A stage begins before each of the `split_points`, places in `nodes_in_order(module)`. The stages must have all
    `variables`, by default those of the module.

    Raises:
        ValueError: a weight belongs to none of the model's layers, and so to no stage.
    """

    def __init__(
        self,
        module: keras.Model,
        split_points: Sequence[int],
        schedule: Schedule,
        variables: Sequence[keras.Variable] | None = None,
    ):
        self.schedule = schedule
        self.stages = split_in_stages(module, split_points)
        self.module = module
        self.split_points = list(split_points)
        self._stages: dict[int, list[int]] = {}  # by variable, those that use it
        for stage in self.stages:
            for variable in stage.variables:
                self._stages.setdefault(id(variable), []).append(stage.index)
        unused = [variable.path for variable in (variables or module.variables) if not self.knows(variable)]
        if unused:
            raise errors.value_error(
                "Every weight of a pipelined model must belong to one of its layers, so that it has a stage.",
                weights=unused,
                fix="Make it in a layer that the model calls.",
            )

    def knows(self, variable: keras.Variable) -> bool:
        """Whether a stage has `variable`."""
        return id(variable) in self._stages

    @property
    def last_stage(self) -> int:
        """The index of the last stage, whose outputs are the model's."""
        return len(self.stages) - 1

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The model's symbolic outputs, flat."""
        return self.stages[-1].stage_outputs

    @property
    def weights(self) -> list[list[keras.Variable]]:
        """The trainable variables that each stage uses."""
        return [[v for v in stage.variables if v.trainable] for stage in self.stages]

    @functools.cached_property
    def masks(self) -> Masks:
        """The Keras masks of what passes between the stages. The model's variables must exist."""
        return Masks(self.stages, self.module.inputs)

    def owners(self, variable: keras.Variable) -> list[int]:
        """Returns the pipeline ranks whose stages use `variable`, ascending."""
        return sorted(set(map(self.schedule.rank_of, self._stages[id(variable)])))

    def regularization(self, stage: int) -> list[tf.Tensor]:
        """Returns the losses of the regularizers of a stage's weights; a weight that stages share counts in the first of them."""
        return [
            variable.regularizer(variable)
            for variable in self.weights[stage]
            if variable.regularizer is not None and self._stages[id(variable)][0] == stage
        ]

    def inputs_like_model(self, flat: Sequence[Any]) -> Any:
        """Returns flat inputs in the structure in which the model takes them."""
        return tree.pack_sequence_as(self.module._inputs_struct, list(flat))

    def outputs_like_model(self, flat: Sequence[Any]) -> Any:
        """Returns flat outputs in the structure in which the model returns them."""
        return tree.pack_sequence_as(self.module._outputs_struct, list(flat))
