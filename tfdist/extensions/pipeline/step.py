"""One step of a pipelined model on one rank: its losses, metrics, outputs and gradients."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import RankProgram, all_reduce, point_to_point
from tfdist.extensions.pipeline.action_clock import ActionClock
from tfdist.extensions.pipeline.executor import Executor, with_zeros
from tfdist.extensions.pipeline.gradients import GradientSum
from tfdist.extensions.pipeline.microbatches import Microbatches, joined
from tfdist.extensions.pipeline.parameter_cache import ParameterCache
from tfdist.extensions.pipeline.schedules.published import ScheduleGPipe
from tfdist.extensions.pipeline.stages.stage import StageLayer, added_losses
from tfdist.extensions.pipeline.stages.stage_functions import StageFunctions, ends_of
from tfdist.extensions.pipeline.stages.staged_model import StagedModel
from tfdist.losses.global_losses import unscale_loss
from tfdist.losses.sliced_batch import SlicedBatch, is_mean_over_rows
from tfdist.losses.step_gradients import weighted_in_gradient
from tfdist.losses.trainer_step import losses_of
from tfdist.metrics import updates
from tfdist.placements.eager import EagerFacts
from tfdist.sharding import config_of
from tfdist.sharding.sharded_activations import gathered, held_spec, mark_as_held


class Step:
    """One rank's step on one batch, by way of an `Executor`.

    Args:
        model: the `PipelineModel`.
        data: (x, y, sample_weight), the batch of this rank's data index. y and sample_weight may be None.
        has_loss: whether the loss and metrics are computed.

    Attributes:
        staged: the model in stages, all of them; the rank computes its own.
        program: the rank's; None: one device computes all stages.
        data: the microbatches of the batch, at most as many as the schedule has.
        schedule: the model's; all forwards first where the loss is none that microbatches add up to.
    """

    def __init__(self, model: Any, data: Any, *, training: bool, has_loss: bool, clock: ActionClock | None = None):
        self.model = model
        self.staged: StagedModel = model.staged_for(data[0])
        self.program: RankProgram | None = model._program()
        self.training = training
        self._has_loss = has_loss
        program, schedule = self.program, self.staged.schedule
        x, *rest = data
        self._all_data = (self.staged.module._standardize_inputs(x), *rest)
        self.data = Microbatches(self._all_data, schedule.num_microbatches, program)
        self._batch = SlicedBatch(program, self.data.rows, self._loss_on_zeros)
        self._reported: list[tf.Tensor] = []
        self._outputs: dict[int, list[tf.Tensor]] = {}  # by microbatch; a schedule may take them in any order
        self._batch_data = data
        self._metrics_wait: bool | None = None  # for the outputs of all microbatches; None: not known yet
        self._first_outputs: list[tf.Tensor] = []  # of the first microbatch, for the sizes
        if has_loss:
            self._build_trackers()
        self._trackers = _LossTrackers(model, self._batch.weigh)
        self.schedule = schedule
        self._last_stage: dict[int, list[tf.Tensor]] = {}  # its outputs by microbatch, where losses are of all together
        self._upstream: list[list[tf.Tensor]] | None = None
        self._is_together = has_loss and not self._adds_up()
        if self._is_together and training:
            self.schedule = ScheduleGPipe(schedule.num_stages, schedule.num_microbatches, schedule.stages_per_rank)
            if program is not None:
                program.plan.note(program.rank, "pipeline: the losses are no means over rows, all forwards before all backwards")
        config = config_of(tf.distribute.get_strategy())
        is_scattered = program is not None and config is not None and model.reshard_after_microbatch
        self._executor = Executor(
            self,
            functions=StageFunctions(program, self.staged.weights, training, None if config is None else config.bucket_bytes),
            gradients=GradientSum(program, config) if is_scattered else GradientSum(),
            clock=clock,
        )

    def run(self) -> "Step":
        """Runs this rank's part of the schedule; returns this step."""
        with contextlib.ExitStack() as before:
            if self.program is not None:
                before.enter_context(self.program.part(ParameterCache).held())
                if self.program.is_eager:  # a microbatch is a part of the rank's rows, which is weighed by hand
                    before.enter_context(self.program.part(EagerFacts).not_seen())
            self._executor.run()
        if self._last_stage and not self.training:
            self._loss_together()
        self._trackers.update(self.data.known_rows)
        if self._metrics_wait:
            x, y, sample_weight = self._batch_data
            found = joined(self._outputs)
            predictions = self.staged.outputs_like_model(found)
            with self._batch.together(self._batch_data, found):
                self.model.compute_metrics(x, y, predictions, sample_weight=sample_weight)
        return self

    def loss(self) -> tf.Tensor:
        """Returns this replica's share of the loss of the batch, the same on all of the replica's ranks."""
        loss = tf.add_n(self._reported) if self._reported else tf.zeros([])
        if self.program is None or self.staged.schedule.num_ranks == 1:
            return loss
        return all_reduce(loss, "pipe", label="pipe/loss")

    def outputs(self) -> Any:
        """Returns the model's outputs for the batch; zeros of their shapes on ranks other than the last."""
        rows = self.data.known_rows
        if self.staged.schedule.rank_of(self.staged.last_stage) == self._executor.pipe_rank:
            flat = joined(self._outputs)
        else:
            flat = self._zeros(tf.add_n(self.data.rows) if rows is None else rows)
        # One static shape on all ranks: they may send it to each other.
        flat = [tf.ensure_shape(x, [rows, *out.shape[1:]]) for x, out in zip(flat, self.staged.outputs, strict=True)]
        return self.staged.outputs_like_model(flat)

    def gradients(self) -> list[tuple[Any, Any]]:
        """Returns (gradient, variable) of the weights of this rank's stages, summed over the microbatches.

        The gradient of a weight that stages share is the sum over all of these stages, on each of their ranks.
        """
        found, sums = [], self._executor.gradients
        for variable in self.staged.module.trainable_variables:
            owners = self.staged.owners(variable)
            if self._executor.pipe_rank not in owners:
                continue
            gradient = sums.of(variable)
            if len(owners) > 1:
                gradient = self._sum_over(owners, variable, gradient, sums.shape_of(variable))
            gradient = sums.handed_out(variable, gradient)
            found.append((gradient if self.program is not None else self._after_reads(gradient), variable))
        # A loss that depends on no weight of this rank is none of the other ranks' mistakes.
        has_any = any(gradient is not None for gradient, _ in found)
        return found if has_any or self.staged.schedule.num_ranks == 1 else []

    def _after_reads(self, gradient: Any) -> Any:
        """Returns a gradient that exists when all actions have ended, and so have read the weights; for Keras's own optimizer.

        The actions' functions read each weight several times, and an update waits for all of them by control dependencies. Keras
        hands all gradients to one `IdentityN`: TensorFlow's graph optimizer first leaves out what that one implies, then it.
        """
        if gradient is None or tf.executing_eagerly():
            return gradient
        with tf.control_dependencies(self._executor.end):
            return tf.nest.map_structure(tf.identity, gradient, expand_composites=True)

    def _sum_over(self, owners: Sequence[int], variable: Any, gradient: Any, shape: tf.TensorShape) -> tf.Tensor:
        """Returns the sum of the gradients of a weight that several ranks use, added in the same order on each of them."""
        program, here = self.program, self._executor.pipe_rank
        mine = tf.zeros(shape, variable.dtype) if gradient is None else tf.convert_to_tensor(gradient)
        mine = tf.ensure_shape(mine, shape)
        ranks, label = program.group_ranks("pipe"), f"pipe/tied/{variable.path}"
        spec = tf.TensorSpec(mine.shape, mine.dtype)
        parts = {here: mine}
        # All ranks send and receive in this order: on GPUs messages wait for each other (`schedules.messages`).
        for source, destination in itertools.permutations(owners, 2):
            if source == here:
                point_to_point.send_message(program, mine, ranks[destination], label)
            elif destination == here:
                parts[source] = point_to_point.receive_message(program, spec, tf.constant(0), ranks[source], label)
        return tf.add_n([parts[owner] for owner in owners])

    # What the executor asks

    def input_specs(self, stage: StageLayer, microbatch: int) -> list[tf.TensorSpec]:
        """Returns shapes and dtypes of what `stage` receives on this rank; only the number of rows may be unknown."""
        rows = self.data.fed_size(microbatch)
        is_of_any_size = all(x.shape[0] is None for x in self.staged.module.inputs)
        return [
            # What has a first size that is known, in a model of batches of any size, has no rows: a rotary table, say.
            tf.TensorSpec(x.shape, x.dtype) if is_of_any_size and x.shape[:1] != (None,) else held_spec(self.program, x, rows)
            for x in stage.stage_inputs
        ]

    def annotate(self, stage: StageLayer, microbatch: int, stage_inputs: Sequence[tf.Tensor]) -> None:
        """Puts on the inputs of `stage` what layers note on a tensor and no message carries, such as a Keras mask."""
        for x, tensor in zip(stage_inputs, stage.stage_inputs, strict=True):
            mark_as_held(self.program, x, tensor)
        self.staged.masks.put(stage.index - 1, stage_inputs, self.data.fed[microbatch])

    def losses(
        self, stage: StageLayer, microbatch: int, stage_inputs: Sequence[tf.Tensor], stage_outputs: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the scalars with whose gradients a stage's backward begins, from the stage's inputs and outputs."""
        if not self._has_loss:
            return []
        stage_index = stage.index
        with self._batch.slice(microbatch):
            given = [x for x in (*stage_inputs, *self.data.fed[microbatch]) if isinstance(x, tf.Tensor)]
            of_weights = map(tf.reduce_sum, self.staged.regularization(stage_index))
            of_layers = [self._batch.of_layer(x, given, self.model) for x in added_losses(stage)]
            found = [*of_layers, *map(self._batch.weigh, of_weights)]
            if stage_index == self.staged.last_stage and not self._is_together:
                self._first_outputs = self._first_outputs or stage_outputs
                with self._trackers.withheld(microbatch):
                    found.append(self._loss(microbatch, self.data.own_rows(microbatch, stage_outputs)))
        return found

    def upstream(self, microbatch: int) -> list[tf.Tensor]:
        """Returns the gradients of the ends of the last stage, of what `losses` does not return; [] if that is all."""
        if self._is_together and self._upstream is None:
            self._upstream = self._loss_together()
        return [] if self._upstream is None else self._upstream[microbatch]

    def observe(self, stage_index: int, microbatch: int, stage_outputs: list[tf.Tensor], losses: list[tf.Tensor]) -> None:
        """Takes note of the outputs and losses of a stage; it is called once for each stage and microbatch."""
        self._reported.extend(tf.cast(tf.stop_gradient(loss), tf.float32) for loss in losses)
        if stage_index < self.staged.last_stage:
            return
        if self._is_together:
            self._last_stage[microbatch] = stage_outputs
        stage_outputs = self.data.own_rows(microbatch, stage_outputs)
        if self._has_loss and self._metrics_wait is None:
            # What is no sum over rows, or may be none, needs all rows: outputs are kept until the step's end for that alone.
            is_own = type(self.model).compute_metrics is not keras.Model.compute_metrics
            self._metrics_wait = is_own or not updates.add_up_over_slices(self.model.metrics, stage_outputs)
        is_kept = not self._has_loss or self._metrics_wait
        if is_kept or self.model._compile_metrics is not None:
            stage_outputs = [gathered(self.program, x) for x in stage_outputs]
        if is_kept:
            self._outputs[microbatch] = stage_outputs
        elif self.model._compile_metrics is not None:  # not by `compute_metrics`: to read a result is a message of all ranks
            _, y, sample_weight = self.data[microbatch]
            predictions = self.staged.outputs_like_model(stage_outputs)
            self.model._compile_metrics.update_state(y, predictions, sample_weight=sample_weight)

    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the scalar whose gradient is taken in the place of a loss's."""
        optimizer = self.model.optimizer
        return loss if optimizer is None else optimizer.scale_loss(loss)

    # Losses

    def _adds_up(self) -> bool:
        """Whether the model's loss is a mean over rows, and so the sum of the shares of microbatches."""
        outputs = [tf.TensorSpec(x.shape, x.dtype) for x in self.staged.outputs]

        def traced(rows: Any) -> tf.Tensor:
            with self._trackers.withheld(None):
                return self._mean(*rows)

        return is_mean_over_rows(traced, (self._all_data, outputs), self.program)

    def _loss_together(self) -> list[list[tf.Tensor]]:
        """Computes the loss of all microbatches together; returns its gradients by the ends of each of them."""
        ends = [ends_of(self._last_stage[microbatch]) for microbatch in sorted(self._last_stage)]
        weights = self.staged.weights[self.staged.last_stage]
        with tf.GradientTape() as recorder:
            recorder.watch(ends)
            outputs = joined({microbatch: self.data.own_rows(microbatch, x) for microbatch, x in self._last_stage.items()})
            with self._batch.together(self._all_data, outputs):
                with losses_of(self.model), self._trackers.withheld(0):
                    loss = weighted_in_gradient(self._mean(self._all_data, outputs))
                self._reported.append(tf.cast(tf.stop_gradient(self._batch.weigh(loss)), tf.float32))
                if not self.training:
                    return []
                of_ends, of_weights = recorder.gradient(self.scale(loss), [ends, weights])
        self._executor.gradients.add(weights, of_weights)
        return [list(map(with_zeros, of_one, x)) for of_one, x in zip(of_ends, ends, strict=True)]

    def _loss(self, microbatch: int, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns a microbatch's share of the model's loss, without the losses of layers."""
        return self._batch.weigh(self._mean(self.data[microbatch], outputs))

    def _mean(self, data: Any, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the model's loss of `data`, without the losses of layers."""
        model = self.model
        if model._compile_loss is None and type(model).compute_loss is keras.Model.compute_loss:
            return tf.zeros([])  # that of layers is all there is, which Keras, not seeing it, would miss
        x, y, sample_weight = data
        predictions = self.staged.outputs_like_model(outputs)
        with model.without_layer_losses():
            loss = model._compute_loss(
                x=self.staged.inputs_like_model(x), y=y, y_pred=predictions, sample_weight=sample_weight, training=self.training
            )
        return tf.convert_to_tensor(loss)

    def _loss_on_zeros(self, microbatch: int) -> None:
        """Calls the loss on zeros in the place of a microbatch's predictions, with the predictions' masks."""
        zeros = self._zeros(self.data.rows[microbatch], self._first_outputs)
        self.staged.masks.put(self.staged.last_stage, zeros, self.data[microbatch][0])
        with self._trackers.withheld(None):
            self._loss(microbatch, zeros)

    def _build_trackers(self) -> None:
        """Makes the variables of losses' and metrics' trackers on all ranks, though the last one alone will use them."""
        _, y, _ = self.data[0]
        predictions = self.staged.outputs_like_model(self._zeros(1))
        for part in (self.model._compile_loss, self.model._compile_metrics):
            if part is not None and not part.built:
                part.build(y, predictions)

    def _zeros(self, rows: Any, like: Sequence[tf.Tensor] | None = None) -> list[tf.Tensor]:
        """Returns zeros of `rows` rows in the place of the model's outputs; other unknown sizes are those of `like`, or 1."""
        zeros = []
        for place, tensor in enumerate(self.staged.outputs):
            sizes = [1 if like is None else tf.shape(like[place])[axis] for axis in range(len(tensor.shape))]
            known = [size if static is None else static for size, static in zip(sizes, tensor.shape, strict=True)]
            zeros.append(tf.ensure_shape(tf.zeros([rows, *known[1:]], tensor.dtype), [None, *tensor.shape[1:]]))
        return zeros


class _LossTrackers:
    """What Keras logs of each loss of a model with several outputs, while the losses of one batch are computed.

    Keras's `CompileLoss` updates a metric for each loss, its tracker, whenever the loss is called: in a pipeline, for every
    microbatch. The tracker should get the loss of the batch, so the microbatches' shares of it are added up first.

    `_compile_loss` and its `_metrics` are private to Keras: test_private_names_of_pipeline.py fails when they change.
    """

    def __init__(self, model: keras.Model, weigh: Callable[[tf.Tensor], tf.Tensor]):
        self._weigh = weigh  # makes a microbatch's share of its mean
        self._compile_loss = model._compile_loss
        self._trackers = list(getattr(self._compile_loss, "_metrics", ()))
        self._losses: dict[int, list[_Losses]] = {}  # by microbatch

    @contextlib.contextmanager
    def withheld(self, microbatch: int | None) -> Iterator[None]:
        """A block in which the trackers get no loss: its losses are kept as those of a microbatch (None: dropped)."""
        stand_ins = [_Losses(self._weigh) for _ in self._trackers]
        with temporary.attributes(self._compile_loss, _metrics=stand_ins) if stand_ins else contextlib.nullcontext():
            yield
        if microbatch is not None:
            self._losses.setdefault(microbatch, stand_ins)

    def update(self, rows: int | None) -> None:
        """Updates the trackers with the batch's losses, weighted by the batch's number of rows, if that is known, as by Keras."""
        for tracker, *parts in zip(self._trackers, *self._losses.values(), strict=True):
            shares = [share for part in parts for share in part.values]
            if shares:
                tracker.update_state(unscale_loss(tf.add_n(shares)), sample_weight=rows)


class _Losses:
    """Takes the place of a tracker. It is no list, which Keras would take for no tracker while it is empty."""

    def __init__(self, weigh: Callable[[tf.Tensor], tf.Tensor]) -> None:
        self.values: list[tf.Tensor] = []
        self._weigh = weigh

    def update_state(self, value: tf.Tensor, sample_weight: Any = None) -> None:
        del sample_weight
        self.values.append(self._weigh(value))
