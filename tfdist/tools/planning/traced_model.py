"""A model, as far as it is known from traces without data and without the values of weights."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import errors
from tfdist.optimizers.support import is_elementwise
from tfdist.sharding import layers_within
from tfdist.tools.planning.equal_layers import equal_layers, units_of
from tfdist.tools.planning.layouts import ModelLayouts
from tfdist.tools.planning.lifetimes import Buffers, Sweep, between
from tfdist.tools.planning.operations import tensor_bytes
from tfdist.tools.planning.optimizer_slots import new_optimizer, slots_of, updates_each_alone
from tfdist.tools.planning.step_profile import StepProfile, profile_of
from tfdist.tools.planning.step_trace import trace_step
from tfdist.tools.planning.tensor_regions import divided_work, on_tensor_rank
from tfdist.tools.planning.weightless import weightless_model

_BATCH_SIZES = (2, 4)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A variable of the model.

    Attributes:
        path: its path in Keras, such as "block_0/attention/query/kernel".
        shape: its shape.
        dtype: its dtype.
        trainable: whether it is trained: has a gradient and optimizer state.
        is_parameter: whether ZeRO shards it: it was made to be trained, and a frozen one is sharded as the others.
    """

    path: str
    shape: tuple[int, ...]
    dtype: tf.DType
    trainable: bool
    is_parameter: bool

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.size


class TracedModel:
    """A model as it is traced: made by `trace`.

    Attributes:
        traces: of its step, for two sizes of the batch.
        sequence_length: the size of axes that its inputs leave open.
        model: the Keras model, whose weights hold no values.
        weights: all its variables, those that are not trained too.
        trained: those that are, in the order of `model.trainable_variables`.
        optimizer: the optimizer's name.
        slots: the optimizer's variables.
        is_elementwise: whether the optimizer may run on shards.
        updates_each_alone: whether it updates each weight when its gradient is there.
        layouts: how the model is sharded over tensor ranks and split in stages.
        calls: the calls of its layers.
        assumed: sentences on what was assumed.
        is_lower_bound: whether sizes are unknown, so that the step may take more memory than is predicted.
    """

    def __init__(self, model: keras.Model, optimizer: Any, sequence_length: int | None):
        self.model = model
        self.sequence_length = sequence_length
        self.weights = tuple(_weight(variable) for variable in model.variables)
        self.trained = tuple(_weight(variable) for variable in model.trainable_variables)
        made = new_optimizer(optimizer if optimizer is not None else getattr(model, "optimizer", None) or "adam")
        inner = getattr(made, "inner_optimizer", made)
        self.optimizer, self.slots = type(inner).__name__, slots_of(model, made)
        self.is_elementwise, self.updates_each_alone = is_elementwise(inner), updates_each_alone(made)
        self.layouts = ModelLayouts(model)
        self.traces = [trace_step(model, size, sequence_length) for size in _BATCH_SIZES]
        first = self.traces[0]
        self.calls = first.calls
        self.assumed = list(first.assumed)
        try:
            unknown = self._sweep(True).unknown
        except ValueError as error:
            raise errors.value_error(
                "`build` returned a model whose operations depend on the size of the batch.",
                fix="Leave Python that branches on `x.shape[0]` out of its layers.",
                model=model.name,
            ) from error
        self.is_lower_bound = unknown > 0
        if unknown:
            self.assumed.append(
                f"{unknown} tensors have sizes that are known only when they are computed, those of loops of unknown "
                "length among them: they count nothing, so the activations are the least that the step takes."
            )

    @property
    def parameters(self) -> int:
        """How many elements the weights have."""
        return sum(weight.elements for weight in self.weights)

    @functools.cached_property
    def statistics(self) -> frozenset[str]:
        """The paths of running statistics, which a step averages over the replicas."""
        norms = [one for one in layers_within(self.model) if isinstance(one, keras.layers.BatchNormalization) and one.trainable]
        return frozenset(variable.path for one in norms for variable in (one.moving_mean, one.moving_variance))

    @functools.lru_cache(maxsize=32)  # noqa: B019  as long as the model
    def profile(self, batch_size: int, tensor: int = 1, is_one_graph: bool = True) -> StepProfile:
        """Returns what is in memory in the course of a step of so many examples, on one of so many tensor ranks.

        `is_one_graph`: whether forward and backward run in one graph, or as functions of their own, as in a pipeline.
        """
        buffers, sweep = self._buffers(batch_size, is_one_graph), self._sweep(is_one_graph)
        if tensor > 1:
            buffers = on_tensor_rank(buffers, self.traces[0], sweep, self.layouts.shardings(tensor), tensor)
        paths = [weight.path for weight in self.trained]
        return profile_of(self.traces[0], sweep, buffers, paths, batch_size)

    @functools.lru_cache(maxsize=32)  # noqa: B019  as long as the model
    def _buffers(self, batch_size: int, is_one_graph: bool = True) -> Buffers:
        return self._sweep(is_one_graph).at(batch_size)

    @functools.cache  # noqa: B019  as long as the model
    def _sweep(self, is_one_graph: bool) -> Sweep:
        first = self.traces[0]
        effects = [operation.name for operation in first.graph.control_outputs]
        return Sweep([one.graph for one in self.traces], _BATCH_SIZES, list(first.gradients), effects, is_one_graph)

    def divided_work(self, tensor: int) -> np.ndarray:
        """Returns for each operation of the first trace whether so many tensor ranks share its work, bool (operations,)."""
        return divided_work(self.traces[0], self._sweep(True), self.layouts.shardings(tensor))

    @functools.cached_property
    def recomputed_calls(self) -> list[int]:
        """The places in `calls` of the blocks that `tfdist.recompute(model, block_pattern)` computes again: layers that are alike
        and have layers of their own."""
        alike = {id(layer) for group in equal_layers(units_of(self.model), 2) for layer in group}
        return [place for place, call in enumerate(self.calls) if call.layer is not None and id(call.layer) in alike]

    @property
    def block_pattern(self) -> str | None:
        """The regular expression of the blocks' names; None where the model has no blocks that are alike."""
        names = [self.calls[place].layer.name for place in self.recomputed_calls]
        return "|".join(dict.fromkeys(re.sub(r"\d+$", "", name).rstrip("_") for name in names)) or None

    @functools.lru_cache(maxsize=256)  # noqa: B019  as long as the model
    def calls_of_stages(self, stages: int) -> list[list[int]]:
        """Returns the places in `calls` of each of so many stages of a pipeline."""
        if stages == 1:
            return [list(range(len(self.calls)))]
        staged = self.layouts.staged(stages)
        stage_of: dict[int, int] = {}
        for stage in staged.stages:
            for operation in stage.operations:
                for layer in layers_within(operation):
                    stage_of.setdefault(id(layer), stage.index)
        found: list[list[int]] = [[] for _ in staged.stages]
        for place, call in enumerate(self.calls):
            found[stage_of.get(id(call.layer), 0)].append(place)
        return found

    def input_bytes(self, batch_size: int) -> int:
        """Returns the bytes of what the model is given in a step."""
        sizes = [sum(tensor_bytes(spec) or 0 for spec in tf.nest.flatten(trace.given)) for trace in self.traces]
        return round(float(between(sizes, _BATCH_SIZES, batch_size)))

    def output_bytes(self, place: int, batch_size: int) -> int:
        """Returns the bytes of what the call at `place` returns."""
        return round(float(between([trace.calls[place].output for trace in self.traces], _BATCH_SIZES, batch_size)))


def trace(build: Callable[[], keras.Model], optimizer: Any = None, *, sequence_length: int | None = None) -> TracedModel:
    """Traces the training step of the model that `build` returns, without data and without memory for its weights.

    Args:
        build: a function without arguments that returns a built Keras model, compiled or not.
        optimizer: a Keras optimizer, or its name; None: that which the model is compiled with, or "adam".
        sequence_length: the size of axes that the model's inputs leave open.

    Raises:
        ValueError: `build` fails, needs values of weights or data, or returns no built Keras model, or one that cannot be traced;
            there is no such optimizer.
    """
    return TracedModel(weightless_model(build), optimizer, sequence_length)


def _weight(variable: keras.Variable) -> Weight:
    shape, dtype = tuple(int(size) for size in variable.shape), tf.as_dtype(variable.dtype)
    is_parameter = bool(variable.value.trainable) and dtype.is_floating
    return Weight(variable.path, shape, dtype, bool(variable.trainable), is_parameter)
