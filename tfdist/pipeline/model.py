"""`PipelineModel`: a Keras model whose layers are spread over a pipeline of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import RankProgram, find_program
from tfdist.losses.keras_seam import unscale_loss
from tfdist.mesh import current_mesh
from tfdist.pipeline.make_schedule import make_schedule
from tfdist.pipeline.schedule import Schedule
from tfdist.pipeline.schedules import Schedule1F1B
from tfdist.pipeline.split import Stages
from tfdist.pipeline.stage import nodes_in_order
from tfdist.pipeline.step import Step
from tfdist.sharding import keras_scope


class PipelineModel(keras.Model):
    """Trains a model in stages, each on its own device, on microbatches of every batch.

    Args:
        layers_or_model: a functional model, a Sequential, or a list of layers.
        num_microbatches: parts of a replica's batch.
        schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble", or one's own (see `tfdist.pipeline.make_schedule`).
        stages: where to cut; None: so that stages cost alike.
        stages_per_rank: stages of each rank.
        name: the model's name.
    """

    def __init__(
        self,
        layers_or_model: keras.Model | Sequence[keras.layers.Layer],
        *,
        num_microbatches: int,
        schedule: str | Schedule | Mapping[int, Any] | Callable[..., Schedule] = "1f1b",
        stages: Any = None,
        stages_per_rank: int = 1,
        name: str | None = None,
    ):
        super().__init__(name=name)
        mesh = current_mesh()
        ranks = 1 if mesh is None else mesh.pipeline_parallel_size
        self.num_microbatches = num_microbatches
        if ranks == 1:
            self._schedule = Schedule1F1B(1, num_microbatches)
        else:
            self._schedule = make_schedule(schedule, ranks * stages_per_rank, num_microbatches, stages_per_rank)
        self._cuts = stages
        is_model = isinstance(layers_or_model, keras.Model)
        self.module = layers_or_model if is_model else keras.Sequential(list(layers_or_model))
        self._stages: Stages | None = None
        self._hides_layer_losses = False
        if self.module.built:
            self.build(None)

    @property
    def schedule(self) -> Schedule:
        """What every rank of the pipeline does, in order."""
        return self._schedule

    def build(self, input_shape: Any) -> None:
        if not self.module.built:
            self.module.build(input_shape)
        functional = getattr(self.module, "_functional", None) or self.module
        num_nodes, num_stages = len(nodes_in_order(functional)), self._schedule.num_stages
        if num_nodes < num_stages:
            raise ValueError(f"more stages than layers: {num_stages} {num_nodes}")
        cuts = self._cuts or [num_nodes * index // num_stages for index in range(1, num_stages)]
        self._stages = Stages(functional, cuts, self._schedule)
        if self._schedule.num_ranks > 1:
            self._stages.place(self.distribute_strategy)
        self._stages.masks  # noqa: B018
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        program = self._program()
        if program is None:
            return self.module(inputs, training=training)
        if training:
            raise RuntimeError("TODO")
        step = self._step((inputs, None, None), training=False, has_loss=False)
        step.run()
        return step.outputs()

    def train_step(self, data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, gradients = self._trained(x, y, sample_weight)
        self._track(loss, x)
        self.optimizer.apply_gradients(gradients)
        return self.get_metrics_result()

    def test_step(self, data: Any) -> Any:
        step = self._step(keras.utils.unpack_x_y_sample_weight(data), training=False, has_loss=True)
        step.run()
        self._track(step.loss(), data)
        return self.get_metrics_result()

    def _trained(self, x: Any, y: Any, sample_weight: Any) -> tuple[tf.Tensor, list[tuple[Any, Any]]]:
        step = self._step((x, y, sample_weight), training=True, has_loss=True)
        step.run()
        return step.loss(), step.gradients()

    def _step(self, data: Any, *, training: bool, has_loss: bool) -> Step:
        return Step(self, self._stages, self._program(), data, training=training, has_loss=has_loss)

    def _track(self, loss: tf.Tensor, x: Any) -> None:
        self._loss_tracker.update_state(unscale_loss(loss), sample_weight=tf.shape(tf.nest.flatten(x)[0])[0])

    def _program(self) -> RankProgram | None:
        """Returns the program of the rank that computes here; None where all stages are computed in one place."""
        return None if keras_scope.in_symbolic_scope() else find_program()

    @contextlib.contextmanager
    def without_layer_losses(self) -> Iterator[None]:
        """Within it `losses`, which `compute_loss` adds up, is empty: every stage has its own."""
        self._hides_layer_losses = True
        try:
            yield
        finally:
            self._hides_layer_losses = False

    @property
    def losses(self) -> list[Any]:
        return [] if self._hides_layer_losses else super().losses

    @property
    def layers(self) -> list[keras.layers.Layer]:
        return self.module.layers
