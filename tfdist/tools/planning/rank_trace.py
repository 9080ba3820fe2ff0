"""A training step as one rank of a plan traces it: the real strategy, model and optimizer, with the other ranks absent."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import CollectivePlan
from tfdist.extensions.pipeline import PipelineModel
from tfdist.extensions.tensor.plans import parallelize, suggest_plan
from tfdist.keras_layers import recompute
from tfdist.losses.undivided_batch import DealtBatches
from tfdist.profiling import memory_report
from tfdist.profiling.memory_report import DeviceMemory as ModelState
from tfdist.sharding import ShardingConfig, settings_of
from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.one_rank import OneRankStrategy
from tfdist.tools.planning.optimizer_slots import new_optimizer
from tfdist.tools.planning.step_trace import generic_loss
from tfdist.tools.planning.traced_model import TracedModel
from tfdist.tools.planning.weightless import names_are_free_again, weightless, weightless_model


@dataclasses.dataclass(frozen=True, eq=False)
class RankTrace:
    """A traced step of one rank.

    Attributes:
        rank: the rank.
        graph: its graph.
        plan: the collectives that it runs.
        state: the model state on its device, as `tfdist.memory_report` counts it.
        passed_bytes: what it hands to other stages of its process along edges of the graph, of which the plan knows nothing.
    """

    rank: int
    graph: tf.Graph
    plan: CollectivePlan
    state: ModelState
    passed_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """The subject of a trace: a model, and its batch.

    Attributes:
        build: the function that makes the model.
        traced: the same model, traced without a strategy.
        batch_size: examples of a step, of all replicas together.
        optimizer: as for `tfdist.plan`.
        hosts: on how many machines the devices are.
        kind: "GPU" or "CPU": what the devices are.
        config: the settings of the strategy that a plan leaves open; None: defaults.
    """

    build: Callable[[], keras.Model]
    traced: TracedModel
    batch_size: int
    optimizer: Any = None
    hosts: int = 1
    kind: str = "GPU"
    config: ShardingConfig | None = None


class BuildError(RuntimeError):
    """A model that can be built without values has not been in the scope of a strategy."""


def trace_rank(job: Job, candidate: Candidate, pipe: int = 0) -> RankTrace:
    """Traces a training step as the first rank at `pipe` of the pipeline does. Its weights have no memory, and nothing runs.

    Raises:
        ValueError, NotImplementedError: the strategy, or a part of the model, refuses the plan.
        BuildError: the model cannot be built in the strategy's scope without values.
    """
    settings = settings_of(job.config, candidate.settings())
    rank = pipe * candidate.tensor  # of replica 0
    strategy = OneRankStrategy(rank, candidate.devices, settings, hosts=job.hosts, kind=job.kind)
    data = _data(job.traced, job.batch_size // candidate.data)
    with names_are_free_again():
        try:
            model = weightless_model(job.build, strategy)
        except ValueError as error:
            raise BuildError(str(error)) from error
        with weightless(strategy):
            model = spread(model, candidate, job.traced.block_pattern or "")
            _compile(model, job.optimizer, data[1])
            model._symbolic_build(data_batch=data)
            model.optimizer.build(model.trainable_variables)
    model.run_eagerly = True  # no function of Keras's, within which the ranks' operations would be: there is one here
    model.make_train_function(force=True)
    step = tf.function(lambda batch: model.train_function(DealtBatches([batch])), autograph=False)
    graph = step.get_concrete_function(data).graph
    state = memory_report(model).devices[rank]
    return RankTrace(rank, graph, strategy.last_plan, state, strategy.edges.passed_bytes)


def _data(traced: TracedModel, rows: int) -> tuple[Any, Any]:
    """Returns the specs of one replica's inputs and targets."""
    trace = traced.traces[0]

    def of_rows(spec: tf.TensorSpec | None) -> tf.TensorSpec | None:
        is_batch = spec is not None and spec.shape.rank and spec.shape[0] == trace.batch_size
        return tf.TensorSpec((rows, *spec.shape[1:]), spec.dtype) if is_batch else spec

    args, kwargs = trace.given
    given = args[0] if len(args) == 1 and not kwargs else kwargs
    return tf.nest.map_structure(of_rows, given), tf.nest.map_structure(of_rows, trace.targets)


def spread(model: keras.Model, candidate: Candidate, blocks: str) -> keras.Model:
    """Returns the model as the lines of `Candidate.python` make it."""
    if candidate.tensor > 1:
        parallelize(model, suggest_plan(model, candidate.tensor), print_fn=None)
    if candidate.recompute and candidate.pipeline == 1:
        recompute(model, blocks)
    if candidate.pipeline == 1:
        return model
    return PipelineModel(
        model,
        num_microbatches=candidate.microbatches,
        schedule=candidate.schedule,
        stages_per_rank=candidate.stages_per_rank,
        recompute=candidate.recompute,
    )


def _compile(model: keras.Model, optimizer: Any, targets: Any) -> None:
    """Compiles the model as it is compiled already, but for the optimizer, if one is given."""
    if not model.compiled:
        model.compile(new_optimizer(optimizer or "adam"), tf.nest.map_structure(generic_loss, targets))
    elif optimizer is not None:
        model.compile(**{**model._compile_config.config, "optimizer": new_optimizer(optimizer)})
