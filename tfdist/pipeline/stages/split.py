"""How a model is cut in stages, and which rank of a pipeline has what."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfdist import errors
from tfdist.pipeline.masks import Masks
from tfdist.pipeline.schedules.schedule import Schedule
from tfdist.pipeline.stages.stage import split
from tfdist.sharding import place


class Stages:
    """A functional model cut in stages, for one schedule.

    Args:
        module: a built functional model.
        cuts: places in `nodes_in_order(module)` before which a stage begins; one fewer than stages.
        schedule: which says what rank has which stage.

    Attributes:
        module: the model.
        layers: the stages.
        weights: per stage, the trainable variables that it uses.
    """

    def __init__(self, module: keras.Model, cuts: Sequence[int], schedule: Schedule):
        self.schedule = schedule
        self.layers = split(module, cuts)
        self.module = module
        self._ranks: dict[int, set[int]] = {}
        self._first_stage: dict[int, int] = {}
        for stage in self.layers:
            for variable in stage.variables_of_operations():
                self._ranks.setdefault(id(variable), set()).add(schedule.rank_of(stage.index))
                self._first_stage.setdefault(id(variable), stage.index)
        unused = [variable.path for variable in module.variables if id(variable) not in self._ranks]
        if unused:
            raise ValueError(
                errors.message(
                    "Every weight of a pipelined model must belong to one of its layers, so that it has a stage.",
                    weights=unused,
                    fix="Make it in a layer that the model calls.",
                )
            )

    @property
    def num_microbatches(self) -> int:
        return self.schedule.num_microbatches

    @property
    def weights(self) -> list[list[keras.Variable]]:
        return [[v for v in stage.variables_of_operations() if v.trainable] for stage in self.layers]

    def place(self, strategy: tf.distribute.Strategy) -> None:
        """Makes, or moves, every variable of the model on the ranks whose stages use it."""
        for variable in self.module.variables:
            place(variable, self.owners(variable), strategy)

    @functools.cached_property
    def masks(self) -> Masks:
        """The masks between the stages; the variables must exist."""
        return Masks(self.layers, self.module.inputs)

    def owners(self, variable: keras.Variable) -> list[int]:
        """Returns the pipeline ranks whose stages use `variable`, ascending."""
        return sorted(self._ranks[id(variable)])

    def weights_of_rank(self, pipe_rank: int) -> list[keras.Variable]:
        """Returns the trainable variables of a rank's stages, each once, in the model's order."""
        return [v for v in self.module.trainable_variables if pipe_rank in self._ranks[id(v)]]

    def regularization(self, stage: int) -> list[tf.Tensor]:
        """Returns the losses of the weights' regularizers; a weight that stages share counts in the first."""
        return [
            variable.regularizer(variable)
            for variable in self.weights[stage]
            if variable.regularizer is not None and self._first_stage[id(variable)] == stage
        ]

    # The model's inputs and outputs, flat and as the user knows them

    def flat_inputs(self, x: Any) -> list[tf.Tensor]:
        """Returns the model's inputs in the order of its symbolic ones, checked and converted as the model does."""
        return self.module._standardize_inputs(x)

    def inputs_like_model(self, flat: Sequence[Any]) -> Any:
        return tree.pack_sequence_as(self.module._inputs_struct, list(flat))

    def outputs_like_model(self, flat: Sequence[Any]) -> Any:
        return tree.pack_sequence_as(self.module._outputs_struct, list(flat))
