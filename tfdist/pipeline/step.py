"""One step of a pipelined model on one rank: its losses, metrics, outputs and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, all_reduce, edges
from tfdist.collectives.unordered import leave_unordered
from tfdist.losses.global_losses import scale_loss
from tfdist.losses.microbatches import MicrobatchLosses
from tfdist.pipeline.clock import NoClock
from tfdist.pipeline.executor import Executor
from tfdist.pipeline.loss_trackers import LossTrackers
from tfdist.pipeline.microbatches import Microbatches
from tfdist.pipeline.stages.split import Stages
from tfdist.sharding import tape
from tfdist.sharding.cut_activations import gathered


class Step:
    """What one rank computes of one batch.

    Args:
        model: the `PipelineModel`, for its loss and metrics.
        stages: how it is cut.
        program: the rank's program; None: one device computes all stages.
        data: (x, y, sample_weight), the batch of this rank's data index. y and sample_weight may be None.
        training: whether there is a backward.
        has_loss: whether the loss and metrics are computed.
        clock: what is told when actions start and end.
    """

    def __init__(
        self,
        model: Any,
        stages: Stages,
        program: RankProgram | None,
        data: Any,
        *,
        training: bool,
        has_loss: bool,
        clock: NoClock,
    ):
        self._began = tape.operations_so_far()
        self._model = model
        self._stages = stages
        self._program = program
        self._training = training
        self._has_loss = has_loss
        replicas = 1 if program is None else program.mesh.data_parallel_size
        x, *rest = data
        self._data = Microbatches(
            (stages.flat_inputs(x), *rest), stages.num_microbatches, is_training=training, replicas=replicas
        )
        self._losses = MicrobatchLosses(program, self._data.rows, self._loss_on_zeros)
        self._reported: list[tf.Tensor] = []
        self._outputs: list[list[tf.Tensor]] = []
        self._first_outputs: list[tf.Tensor] = []  # of the first microbatch, for the sizes
        if has_loss:
            self._build_trackers()
        self._trackers = LossTrackers(model)
        self._executor = Executor(
            stages.schedule,
            stages.layers,
            program,
            weights=stages.weights,
            count=self._data.count,
            inputs_of=lambda number: self._data[number][0],
            rows_of=lambda number: tf.cast(self._data.rows[number], tf.int32),
            losses_of=self._losses_of,
            observe=self._observe,
            scale=self._scaled,
            masks=stages.masks,
            training=training,
            recompute=model.recompute,
            clock=clock,
        )

    def run(self) -> None:
        """Runs this rank's part of the schedule."""
        self._executor.run()
        self._trackers.update(self._data.known_rows)
        leave_unordered(tape.operations_since(self._began))

    @property
    def is_last(self) -> bool:
        """Whether this rank has the model's outputs."""
        return self._stages.schedule.rank_of(len(self._stages.layers) - 1) == self._executor.pipe_rank

    def loss(self) -> tf.Tensor:
        """Returns this replica's share of the loss of the batch, the same on all of its ranks."""
        loss = tf.add_n(self._reported) if self._reported else tf.zeros([])
        if self._program is None or self._stages.schedule.num_ranks == 1:
            return loss
        return all_reduce(loss, "pipe", label="pipe/loss")

    def outputs(self) -> Any:
        """Returns the model's outputs for the batch; zeros on ranks other than the last."""
        rows, leaving = self._data.known_rows, self._stages.layers[-1].leaving
        if self.is_last:
            flat = [tf.concat(parts, 0) for parts in zip(*self._outputs, strict=True)]
        else:
            size = tf.cast(tf.add_n(self._data.rows), tf.int32) if rows is None else rows
            flat = self._zeros(size)
        # One static shape on all ranks: they may send it to each other.
        flat = [tf.ensure_shape(x, [rows, *tensor.shape[1:]]) for x, tensor in zip(flat, leaving, strict=True)]
        return self._stages.outputs_like_model(flat)

    def gradients(self) -> list[tuple[Any, Any]]:
        """Returns (gradient, variable) for the weights of this rank's stages, summed over microbatches and over tied uses."""
        found = []
        for variable in self._stages.weights_of_rank(self._executor.pipe_rank):
            gradient = self._executor.gradients.of(variable)
            owners = self._stages.owners(variable)
            if len(owners) > 1:
                gradient = self._sum_over(owners, variable, gradient)
            found.append((gradient, variable))
        return found

    def _sum_over(self, owners: Sequence[int], variable: Any, gradient: Any) -> tf.Tensor:
        """Returns the sum of the gradients of a weight that several ranks use, added in the same order on each."""
        program, here = self._program, self._executor.pipe_rank
        mine = tf.zeros(variable.shape, variable.dtype) if gradient is None else tf.convert_to_tensor(gradient)
        mine = tf.ensure_shape(mine, variable.value.shape)
        ranks, label = program.group_ranks("pipe"), f"pipe/tied/{variable.path}"
        for owner in owners:
            if owner != here:
                edges.send(program, mine, ranks[owner], label)
        spec = tf.TensorSpec(mine.shape, mine.dtype)
        parts = [mine if owner == here else edges.receive(program, spec, tf.constant(0), ranks[owner], label) for owner in owners]
        return tf.add_n(parts)

    # What the executor asks

    def _losses_of(self, stage: int, number: int, left: list[tf.Tensor]) -> list[tf.Tensor]:
        if not self._has_loss:
            return []
        with self._losses.of(number):
            layer = self._stages.layers[stage]
            found = [scale_loss(tf.reduce_sum(loss)) for loss in (*layer.added_losses(), *self._stages.regularization(stage))]
            if stage == len(self._stages.layers) - 1:
                self._first_outputs = self._first_outputs or left
                with self._trackers.collected(number):
                    found.append(self._loss(number, left))
        return found

    def _loss(self, number: int, left: Sequence[tf.Tensor]) -> tf.Tensor:
        x, y, sample_weight = self._data[number]
        predictions = self._stages.outputs_like_model(left)
        with self._model.without_layer_losses():
            return self._model._compute_loss(
                x=self._stages.inputs_like_model(x), y=y, y_pred=predictions, sample_weight=sample_weight, training=self._training
            )

    def _loss_on_zeros(self, number: int) -> None:
        zeros = self._zeros(tf.cast(self._data.rows[number], tf.int32), self._first_outputs)
        self._stages.masks.put(len(self._stages.layers) - 1, zeros, self._data[number][0])
        with self._trackers.ignored():
            self._loss(number, zeros)

    def _observe(self, stage: int, number: int, left: list[tf.Tensor], losses: list[tf.Tensor]) -> None:
        self._reported.extend(tf.cast(tf.stop_gradient(loss), tf.float32) for loss in losses)
        if stage < len(self._stages.layers) - 1:
            return
        if not self._has_loss:
            self._outputs.append(left if self._program is None else [gathered(self._program, x) for x in left])
            return
        x, y, sample_weight = self._data[number]
        self._model.compute_metrics(
            self._stages.inputs_like_model(x), y, self._stages.outputs_like_model(left), sample_weight=sample_weight
        )

    def _build_trackers(self) -> None:
        """Makes the variables of metrics, if nothing has yet: on all ranks, though the last one alone will use them."""
        _, y, _ = self._data[0]
        predictions = self._stages.outputs_like_model(self._zeros(1))
        for part in (self._model._compile_loss, self._model._compile_metrics):
            if part is not None and not part.built:
                part.build(y, predictions)

    def _zeros(self, rows: Any, like: Sequence[tf.Tensor] | None = None) -> list[tf.Tensor]:
        """Returns zeros of `rows` rows in the place of the model's outputs; other unknown sizes are those of `like`, or 1."""
        zeros = []
        for place, tensor in enumerate(self._stages.layers[-1].leaving):
            sizes = [1 if like is None else tf.shape(like[place])[axis] for axis in range(len(tensor.shape))]
            known = [size if static is None else static for size, static in zip(sizes, tensor.shape, strict=True)]
            zeros.append(tf.ensure_shape(tf.zeros([rows, *known[1:]], tensor.dtype), [None, *tensor.shape[1:]]))
        return zeros

    def _scaled(self, loss: tf.Tensor) -> tf.Tensor:
        optimizer = self._model.optimizer
        return loss if optimizer is None else optimizer.scale_loss(loss)
