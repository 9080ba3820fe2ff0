"""`PipelineModel`: a Keras model whose layers are spread over a pipeline of ranks."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfdist import errors, temporary
from tfdist.collectives import RankProgram, rank_program
from tfdist.extensions.pipeline.deferred_weights import make_on
from tfdist.extensions.pipeline.given_model import Stage, check_module, module_of
from tfdist.extensions.pipeline.schedules.make_schedule import make_schedule
from tfdist.extensions.pipeline.schedules.published import Schedule1F1B
from tfdist.extensions.pipeline.schedules.schedule import Schedule
from tfdist.extensions.pipeline.stages.balance_report import report
from tfdist.extensions.pipeline.stages.block_graph import graph_of_blocks
from tfdist.extensions.pipeline.stages.costs import node_costs
from tfdist.extensions.pipeline.stages.split_points import resolve_split_points
from tfdist.extensions.pipeline.stages.staged_model import StagedModel
from tfdist.extensions.pipeline.step import Step
from tfdist.keras_layers.in_stages import InStages
from tfdist.losses.global_losses import unscale_loss
from tfdist.mesh import current_mesh
from tfdist.runtime import begin_use
from tfdist.sharding import config_of


@keras.saving.register_keras_serializable("tfdist")
class PipelineModel(keras.Model, InStages):
    """Trains a model whose layers live on different devices, on microbatches of every batch.

    Under `ShardedStrategy(pipeline_parallel_size=p)` each of p ranks has a part of the layers, a *stage*: their weights,
    optimizer state and activations exist on that rank's device only. A batch is split in microbatches, which follow each other
    through the stages, forward and back, in the order of a *schedule*. The gradients are those of the whole batch, exactly, and
    so are the loss, masks, sample weights and metrics; `compile`, `fit`, `evaluate`, `predict`, `get_weights` and `save_weights`
    are those of the model inside. Dropout and BatchNormalization see microbatches, as on one device that is fed them one by one.

        with strategy.scope():
            model = tfdist.PipelineModel(build_model(), num_microbatches=8)
            model.compile("adam", loss)
        model.fit(dataset)

    What it saves: a rank holds 1/p of the weights, gradients and optimizer state, and with "1f1b" the activations of at most p
    microbatches. It holds those of all, whatever the schedule, where a loss is no mean over rows (a root, Dice). What it costs:
    at the start and end of a step ranks wait for each other, (p-1)/m of the ideal time with m microbatches; and the activations
    that pass between stages.

    The life of a weight: under a strategy with a pipeline, layers put off making their weights. `PipelineModel` makes each weight
    on the ranks whose stages use it. A weight that stages share (an embedding that is the output head, too) is on several ranks;
    its gradients are summed.

    The mistake to avoid: loading weights into the model before it is wrapped, which makes them on every rank first.

    Without a strategy, or with `pipeline_parallel_size=1`, the model trains on the same microbatches on one device.

    Args:
        layers_or_model: a functional model, also with several inputs and outputs and with skip connections; a Sequential; a list
            of layers; a list of `tfdist.pipeline.Stage`, one per stage; or a subclassed model, whose `blocks` are named.
        num_microbatches: how many microbatches a replica's batch is split in.
        blocks: of a subclassed model the attribute that holds its blocks, in a list or a Sequential: "blocks" for `self.blocks`,
            "encoder.blocks" for those of a layer; several, as `["encoder", "decoder"]`. The model may be split before each
            block's call, and after the last one.
        schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble"; or a custom one (see `tfdist.pipeline.make_schedule`).
        stages: where the model is split: the names of the layers with which stages 1, 2, ... begin, or the places of these layers
            in `model.layers`; None: so that the stages cost alike.
        stages_per_rank: how many stages each rank has, for "interleaved".
        recompute: True keeps, of a microbatch, only what arrives at each stage, and computes the stage's forward again for its
            backward: a third more work, and the same gradients (random numbers and statistics are those of the first time).
        reshard_after_microbatch: at `zero_stage=3`: False gathers the weights of a rank's stages once a step and keeps them until
            its last microbatch is through, and so it does with the sums of whole gradients. True gathers weights for each forward
            and each backward of a microbatch, keeps those of one stage and direction at once, and reduces gradients after each
            backward: 2 `num_microbatches` times the messages of weights, `num_microbatches` times those of gradients.
        name: the model's name.

    Raises:
        ValueError: an argument is out of range, there are more stages than layers, a layer of `stages` does not exist, or the
            schedule cannot run.
        NotImplementedError: a subclassed model without `blocks`, or another strategy.

    Source: GPipe, Huang et al. 2019; 1F1B, Narayanan et al. 2021 (PipeDream-Flush); interleaved, Narayanan et al. 2021
    (Megatron-LM); zero bubble, Qi et al. 2023.
    """

    def __init__(
        self,
        layers_or_model: keras.Model | Sequence[keras.layers.Layer | Stage],
        *,
        num_microbatches: int,
        blocks: str | Sequence[str] | None = None,
        schedule: str | Schedule | Mapping[int, Any] | Callable[..., Schedule] = "1f1b",
        stages: Sequence[str | int] | None = None,
        stages_per_rank: int = 1,
        recompute: bool = False,
        reshard_after_microbatch: bool = False,
        name: str | None = None,
    ):
        begin_use()  # the losses of microbatches need it outside every strategy, too
        super().__init__(name=name)
        errors.check_integer("num_microbatches", num_microbatches, least=1)
        errors.check_integer("stages_per_rank", stages_per_rank, least=1)
        strategy = tf.distribute.get_strategy()
        if config_of(strategy) is None and strategy.num_replicas_in_sync > 1:
            raise errors.not_implemented(
                "A `PipelineModel` needs a strategy of tfdist, or none.",
                strategy=type(strategy).__name__,
                fix="Use `tfdist.ShardedStrategy(pipeline_parallel_size=...)`.",
            )
        mesh = current_mesh()
        ranks = 1 if mesh is None else mesh.pipeline_parallel_size
        module, split_points = module_of(layers_or_model, stages)
        self._blocks = None if blocks is None else (blocks,) if isinstance(blocks, str) else tuple(blocks)
        check_module(module, self._blocks)
        self.num_microbatches = num_microbatches
        self.stages_per_rank = stages_per_rank
        self.recompute = bool(recompute)
        self.reshard_after_microbatch = bool(reshard_after_microbatch)
        self.module = module
        self._split_points = split_points
        if ranks > 1:
            self._schedule = make_schedule(schedule, ranks * stages_per_rank, num_microbatches, stages_per_rank)
        else:
            # None is needed, but what could be none is refused.
            is_grid = isinstance(schedule, Schedule | Mapping) or isinstance(schedule, str) and " " in schedule.strip()
            make_schedule(schedule, *(() if is_grid else (2 * stages_per_rank, max(num_microbatches, 2), stages_per_rank)))
            self._schedule = Schedule1F1B(1, num_microbatches)
        self._given_schedule = schedule
        self._staged: StagedModel | None = None
        self._hides_layer_losses = False
        if module.built and blocks is None:
            self.build(None)
        if module.compiled:  # as KerasHub's tasks are from the beginning
            self.compile(**module._compile_config.config)
            module.compiled, module.optimizer, module._compile_loss, module._compile_metrics = False, None, None, None

    # Stages

    @property
    def schedule(self) -> Schedule:
        """The actions of every rank of the pipeline, in order."""
        return self._schedule

    def build(self, input_shape: Any) -> None:
        """Builds the model inside, splits it in stages, and makes each weight on the ranks whose stages use it."""
        if self._staged is not None:
            self._split(self._staged.module)
        elif self._blocks is not None:
            self._build_for(tree.map_shape_structure(keras.KerasTensor, input_shape))
        else:
            if not self.module.built:
                self.module.build(input_shape)
            self._split(getattr(self.module, "_functional", None) or self.module)

    def staged_for(self, x: Any) -> StagedModel:
        """Returns the model in stages; built, where that is possible, for inputs like `x`."""
        if not self._is_in_stages():
            if rank_program() is not None:
                raise errors.runtime_error(
                    "A `PipelineModel` must be built before ranks compute with it, and again when a layer has made more "
                    "variables: each makes its own stages' weights.",
                    fix="Call `model.build(input_shape)` in `strategy.scope()`.",
                )
            with tf.init_scope():
                self._build_for(x)
        return self._staged

    def _build_for(self, inputs: Any) -> None:
        """Builds for tensors like `inputs`: shapes do not say that an input of a subclassed model is of integers."""
        if self._staged is not None or self._blocks is None:
            self.build(tree.map_structure(lambda x: (None, *x.shape[1:]), inputs))
            return
        inputs = tree.map_structure(
            lambda x: keras.Input((*x.shape[1:],), dtype=keras.backend.standardize_dtype(x.dtype)), inputs
        )
        self._built_for = inputs
        self.module(inputs)
        self._split(graph_of_blocks(self.module, self._blocks, inputs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._blocks is not None and not self.built and args:
            self._build_for(args[0])
        return super().__call__(*args, **kwargs)

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if not self._is_in_stages():
            if data_batch is None:
                data_batch = next(next(iter(iterator))[2])
            # Before Keras calls it in a scope in which no variable can be made.
            self._build_for(keras.utils.unpack_x_y_sample_weight(data_batch)[0])
        super()._symbolic_build(iterator=iterator, data_batch=data_batch)

    def get_build_config(self) -> Any:
        if self._blocks is None or not self.built:
            return super().get_build_config()
        specs = tree.map_structure(lambda x: keras.KerasTensor(x.shape, x.dtype, name=x.name), self._built_for)
        return {"inputs": keras.saving.serialize_keras_object(specs)}

    def build_from_config(self, config: Any) -> None:
        if "inputs" in config:
            self._build_for(keras.saving.deserialize_keras_object(config["inputs"]))
        else:
            super().build_from_config(config)

    def _is_in_stages(self) -> bool:
        """Whether the model is, with all variables: a layer may have made some since it was split, as `enable_lora` does."""
        return self._staged is not None and all(map(self._staged.knows, self.module.variables))

    def _split(self, functional: keras.Model) -> None:
        """Splits the model in stages; one that is in stages already stays split where it is."""
        if self._staged is not None:
            split_points = self._staged.split_points
        else:
            split_points = resolve_split_points(functional, self._split_points, self._schedule.num_stages)
        self._staged = StagedModel(functional, split_points, self._schedule, self.module.variables)
        if self._schedule.num_ranks > 1:
            for variable in functional.variables:
                make_on(self._staged.owners(variable), variable, self.distribute_strategy)
        self.built = True

    def stage_report(self) -> str:
        """Returns a table with each stage's rank, layers, share of the work and bytes, and a line on how even the stages are.

        Raises:
            ValueError: the model is not built yet.
        """
        if self._staged is None:
            raise errors.value_error("The model is not cut yet.", fix="Build it first: `model.build(input_shape)`.")
        return report(self._staged, node_costs(self._staged.module))

    @property
    def output_names(self) -> Any:
        """The names by which `compile` knows the outputs of the model inside; None: it names none."""
        return getattr(self.module, "output_names", None)

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers of the model inside."""
        return self.module.layers

    def get_layer(self, name: str | None = None, index: int | None = None) -> keras.layers.Layer:
        return self.module.get_layer(name=name, index=index)

    def summary(self, *args: Any, **kwargs: Any) -> None:
        self.module.summary(*args, **kwargs)

    # Computing

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        program = self._program()
        if program is None or self._schedule.num_ranks == 1:
            return self.module(inputs, training=training)
        if training:
            raise errors.runtime_error(
                "A pipelined model cannot be called for training in `strategy.run`: its backward belongs to the schedule.",
                fix="Use `loss, gradients = model.compute_gradients(x, y)`, then `optimizer.apply_gradients(gradients)`.",
            )
        return self._inferred(inputs)

    def train_step(self, data: Any) -> Any:
        return self._step_with_loss(data, training=True)

    def test_step(self, data: Any) -> Any:
        return self._step_with_loss(data, training=False)

    def _step_with_loss(self, data: Any, *, training: bool) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        step = Step(self, (x, y, sample_weight), training=training, has_loss=True).run()
        if training:
            self.optimizer.apply_gradients(step.gradients())  # first: else their sums would come after those of the loss
        self._loss_tracker.update_state(unscale_loss(step.loss()), sample_weight=tf.shape(tf.nest.flatten(x)[0])[0])
        return self.get_metrics_result()

    def predict_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self._inferred(x)

    def compute_gradients(self, x: Any, y: Any = None, sample_weight: Any = None) -> tuple[tf.Tensor, list[tuple[Any, Any]]]:
        """Runs the schedule on one batch: for custom training loops, in the function given to `strategy.run`.

        It also updates the metrics. The model must be compiled, with the loss and with the optimizer that is to be given the
        gradients.

        Args:
            x: this replica's batch, any structure of tensors (batch, ...).
            y: the batch's targets.
            sample_weight: the batch's weights.

        Returns:
            This replica's share of the loss, a float32 scalar (the shares of all replicas add up to the loss of the global
            batch), and (gradient, variable) of the weights of this rank's stages: what `optimizer.apply_gradients` takes.
        """
        step = Step(self, (x, y, sample_weight), training=True, has_loss=True).run()
        return step.loss(), step.gradients()

    def _inferred(self, x: Any) -> Any:
        return Step(self, (x, None, None), training=False, has_loss=False).run().outputs()

    def _program(self) -> RankProgram | None:
        """Returns the program of the rank that computes here; None where one device computes all stages."""
        program = rank_program()
        if program is not None and program.is_eager and self._schedule.num_ranks > 1:
            raise errors.not_implemented(
                "A pipeline needs a traced step: eager ranks take turns, and would wait for each other.",
                fix="Leave out `run_eagerly=True`, and call `strategy.run` in a `tf.function`.",
            )
        return program

    def without_layer_losses(self) -> contextlib.AbstractContextManager[None]:
        """A block in which `losses`, which Keras's `compute_loss` adds up, is empty: every stage adds up those of its layers."""
        return temporary.attributes(self, _hides_layer_losses=True)  # they nest where a loss asks for divisors of data

    @property
    def losses(self) -> list[Any]:
        return [] if self._hides_layer_losses else super().losses

    # Saving: the files are those of the model inside, compiled as this one is

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        with self._optimizer_inside():
            self.module.save_weights(filepath, *args, **kwargs)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        with self._optimizer_inside():
            self.module.load_weights(filepath, *args, **kwargs)

    def _optimizer_inside(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the optimizer is that of the model inside, which Keras saves and loads with the model's weights."""
        return temporary.attributes(self.module, optimizer=getattr(self, "optimizer", None))  # None before it is compiled

    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        self.module.export(filepath, *args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        schedule = self._given_schedule
        module = keras.saving.serialize_keras_object(self.module)
        module.pop("compile_config", None)  # of a model inside that compiles itself: this one's counts
        return {
            "layers_or_model": module,
            "num_microbatches": self.num_microbatches,
            "blocks": None if self._blocks is None else list(self._blocks),
            "schedule": schedule if isinstance(schedule, str) else self._schedule.to_text(),
            "stages": None if self._split_points is None else list(self._split_points),
            "stages_per_rank": self.stages_per_rank,
            "recompute": self.recompute,
            "reshard_after_microbatch": self.reshard_after_microbatch,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "PipelineModel":
        module = keras.saving.deserialize_keras_object(config["layers_or_model"], custom_objects=custom_objects)
        return cls(**{**config, "layers_or_model": module})
