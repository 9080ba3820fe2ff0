"""What is known of a model from traces without data and without the values of weights."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfdist import errors
from tfdist.planning.equal_layers import LayerCall, equal_layers, units_of
from tfdist.planning.layouts import ModelLayouts
from tfdist.planning.lifetimes import Buffers, Sweep
from tfdist.planning.optimizer_slots import Slot, slots_of, updates_each_alone
from tfdist.planning.step_profile import StepProfile, end_of, profile_of
from tfdist.planning.step_trace import StepTrace, trace_step
from tfdist.planning.tensor_regions import divided_work, on_tensor_rank
from tfdist.planning.weightless import weightless_model
from tfdist.sharding import layers_within

_BATCH_SIZES = (2, 4)
Runs = Literal["whole", "apart", "in turn"]
_PROFILED = (16, 32)  # small tensors are ordered in another way


@dataclasses.dataclass(frozen=True)
class Affine:
    """A number that grows with the batch: `fixed + per_example * batch_size`."""

    fixed: float
    per_example: float

    def at(self, batch_size: float) -> int:
        """Returns it for so many examples."""
        return max(round(self.fixed + self.per_example * batch_size), 0)

    @classmethod
    def through(cls, sizes: tuple[int, int], values: tuple[float, float]) -> Affine:
        """Returns the line through the values at two sizes of the batch."""
        slope = (values[1] - values[0]) / (sizes[1] - sizes[0])
        return cls(values[0] - slope * sizes[0], slope)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A variable of the model.

    Attributes:
        path: its path in Keras, such as "block_0/attention/query/kernel".
        shape: its shape.
        dtype: the name of its dtype.
        trainable: whether it is trained: has a gradient and optimizer state.
        is_parameter: whether it was made to be trained: a frozen weight is sharded as the others.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    is_parameter: bool

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * tf.as_dtype(self.dtype).size


@dataclasses.dataclass(frozen=True)
class Block:
    """A layer that the model calls, or as many equal ones as follow each other.

    Attributes:
        name: the name of the layer, of several the first.
        count: how many equal layers it stands for.
        layers: the names of all of them.
        weights: the weights of one of them, without those that an earlier block has.
        flops: floating-point operations of forward, for one example.
        kept: bytes that forward keeps for backward.
        peak: bytes of what this layer has made at the fullest moment of its forward and backward, with what it keeps.
        output: bytes of what it returns.
    """

    name: str
    count: int
    layers: tuple[str, ...]
    weights: tuple[Weight, ...]
    flops: float
    kept: Affine
    peak: Affine
    output: Affine

    @property
    def weight_bytes(self) -> int:
        return sum(weight.bytes for weight in self.weights)


class TracedModel:
    """A model as it is traced: made by `trace`.

    Attributes:
        traces: of its step, for two sizes of the batch.
        sequence_length: the size of axes that its inputs leave open.
        model: the Keras model, whose weights hold no values.
        name: its name.
        weights: all its variables, those that are not trained too.
        trained: those that are, in the order of `model.trainable_variables`.
        optimizer: the optimizer's name.
        slots: the optimizer's variables.
        is_elementwise: whether the optimizer may run on shards.
        updates_each_alone: whether it updates each weight when its gradient is there.
        layouts: how the model is sharded over tensor ranks and split in stages.
        calls: the calls of its layers.
        assumed: sentences on what was assumed.
    """

    def __init__(self, model: keras.Model, optimizer: Any, sequence_length: int | None):
        self.model = model
        self.name = model.name
        self.sequence_length = sequence_length
        self.weights = tuple(_weight(variable) for variable in model.variables)
        self.trained = tuple(_weight(variable) for variable in model.trainable_variables)
        self.optimizer, self.slots, self.is_elementwise = slots_of(model, optimizer)
        self.updates_each_alone = updates_each_alone(optimizer or getattr(model, "optimizer", None) or "adam")
        self.layouts = ModelLayouts(model)
        self.traces = [trace_step(model, size, sequence_length) for size in _BATCH_SIZES]
        first = self.traces[0]
        self.calls = first.calls
        self.assumed = list(first.assumed)
        try:
            self._sweep = self._swept()
        except ValueError as error:
            raise errors.value_error(
                "`build` returned a model whose operations depend on the size of the batch.",
                fix="Leave Python that branches on `x.shape[0]` out of its layers.",
                model=model.name,
            ) from error
        if self._sweep.unknown:
            self.assumed.append(
                f"{self._sweep.unknown} tensors have sizes that are known only when they are computed, those of loops of unknown "
                "length among them: they count nothing, so the activations are the least that the step takes."
            )

    @property
    def parameters(self) -> int:
        """How many elements the weights have."""
        return sum(weight.elements for weight in self.weights)

    @property
    def first_trace(self) -> StepTrace:
        """The trace of the smaller batch."""
        return self.traces[0]

    @functools.cached_property
    def statistics(self) -> frozenset[str]:
        """The paths of running statistics, which a step averages over the replicas."""
        norms = [one for one in layers_within(self.model) if isinstance(one, keras.layers.BatchNormalization) and one.trainable]
        return frozenset(variable.path for one in norms for variable in (one.moving_mean, one.moving_variance))

    @property
    def is_lower_bound(self) -> bool:
        """Whether sizes are unknown, so that the step may take more memory than is predicted."""
        return self._sweep.unknown > 0

    @functools.lru_cache(maxsize=32)  # noqa: B019  as long as the model
    def profile(self, batch_size: int, tensor: int = 1, runs: Runs = "whole") -> StepProfile:
        """Returns what is in memory in the course of a step of so many examples, on one of so many tensor ranks.

        Args:
            batch_size: how many examples.
            tensor: how many tensor ranks.
            runs: "whole": forward and backward in one graph; "apart": as functions of their own, as in a pipeline; "in turn":
                block after block, each when backward is through with the one behind, as they are computed again.
        """
        buffers, sweep = self._buffers(batch_size, runs), self._sweep_apart if runs == "apart" else self._sweep
        if tensor > 1:
            buffers = on_tensor_rank(buffers, self.traces[0], sweep, self.layouts.shardings(tensor), tensor)
        paths = [weight.path for weight in self.trained]
        return profile_of(self.traces[0], sweep, buffers, paths, batch_size)

    @functools.lru_cache(maxsize=32)  # noqa: B019  as long as the model
    def _buffers(self, batch_size: int, runs: Runs = "whole") -> Buffers:
        sweep = self._sweep_apart if runs == "apart" else self._sweep
        return sweep.at(batch_size, chance=0.0) if runs == "in turn" else sweep.at(batch_size)

    @functools.cached_property
    def _sweep_apart(self) -> Sweep:
        return self._swept(is_one_graph=False)

    def _swept(self, is_one_graph: bool = True) -> Sweep:
        first = self.traces[0]
        effects = [operation.name for operation in first.graph.control_outputs]
        return Sweep([one.graph for one in self.traces], _BATCH_SIZES, list(first.gradients), effects, is_one_graph)

    def divided_work(self, tensor: int) -> np.ndarray:
        """Returns for each operation of the first trace whether so many tensor ranks share its work, bool (operations,)."""
        return divided_work(self.traces[0], self._sweep, self.layouts.shardings(tensor))

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

    @functools.cached_property
    def slots_of_parameters(self) -> list[list[Slot]]:
        """The optimizer's variables for each of `trained`."""
        found: list[list[Slot]] = [[] for _ in self.trained]
        for slot in self.slots:
            if slot.of is not None:
                found[slot.of].append(slot)
        return found

    @functools.cached_property
    def other_slot_bytes(self) -> int:
        """Bytes of the optimizer's variables that are of no parameter."""
        return sum(slot.bytes for slot in self.slots if slot.of is None)

    @functools.lru_cache(maxsize=256)  # noqa: B019  as long as the model
    def calls_of_stages(self, stages: int) -> list[list[int]]:
        """Returns the places in `calls` of each of so many stages of a pipeline."""
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

    def _output(self, place: int) -> Affine:
        low, high = (trace.calls[place].output for trace in self.traces)
        return Affine.through(_BATCH_SIZES, (low, high))

    def input_bytes(self, batch_size: int) -> int:
        """Returns the bytes of what the model is given in a step."""
        low, high = (trace.inputs for trace in self.traces)
        return Affine.through(_BATCH_SIZES, (low, high)).at(batch_size)

    def output_bytes(self, place: int, batch_size: int) -> int:
        """Returns the bytes of what the call at `place` returns."""
        return self._output(place).at(batch_size)

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The layers that the model calls, in order, equal ones that follow each other as one."""
        low, high = (self.profile(size) for size in _PROFILED)
        flops = [self._sweep.flops(size) for size in _BATCH_SIZES]
        seen: set[str] = set()
        found: list[Block] = []
        for place, call in enumerate(self.calls):
            traced = call.stands_for or call
            at = self.calls.index(traced)
            sums = [float(one[traced.start : end_of(self.calls, at, self.traces[0].forward)].sum()) for one in flops]
            own = [weight for weight in _weights_of(call) if weight.path not in seen]
            seen.update(weight.path for weight in own)
            block = Block(
                name=call.layer.name if call.layer is not None else "inputs",
                count=1,
                layers=(call.layer.name if call.layer is not None else "inputs",),
                weights=tuple(own),
                flops=(sums[1] - sums[0]) / (_BATCH_SIZES[1] - _BATCH_SIZES[0]),
                kept=Affine.through(_PROFILED, (low.kept[place], high.kept[place])),
                peak=Affine.through(_PROFILED, (low.of_calls[at].max(), high.of_calls[at].max())),
                output=self._output(place),
            )
            if found and call.layer is not None and _alike(found[-1], block):
                found[-1] = dataclasses.replace(found[-1], count=found[-1].count + 1, layers=(*found[-1].layers, block.name))
            else:
                found.append(block)
        return tuple(found)


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
    shape = tuple(int(size) for size in variable.shape)
    return Weight(
        variable.path, shape, tf.as_dtype(variable.dtype).name, bool(variable.trainable), bool(variable.value.trainable)
    )


def _weights_of(call: LayerCall) -> list[Weight]:
    return [] if call.layer is None else [_weight(variable) for variable in call.layer.variables]


def _alike(one: Block, other: Block) -> bool:
    if [(x.shape, x.dtype, x.trainable) for x in one.weights] != [(x.shape, x.dtype, x.trainable) for x in other.weights]:
        return False
    close = all(
        math.isclose(a, b, rel_tol=0.02, abs_tol=64)
        for a, b in ((one.flops, other.flops), (one.kept.at(2), other.kept.at(2)), (one.output.at(2), other.output.at(2)))
    )
    return close and one.weight_bytes > 0
