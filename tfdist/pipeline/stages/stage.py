"""A stage: consecutive operations of a Keras model, which one rank of a pipeline computes.

    inputs x ──────────┬───────────────┐          the model's inputs: every rank has them
                       │               │
    [ embed  block_0 ] ─ h ─> [ block_1  head ] ─> outputs
         stage 0       boundary    stage 1

What a later stage needs of an earlier one is its boundary: usually one tensor. A skip connection over several stages is carried
along through those between.

A functional model's nodes are private to Keras: tests/pipeline/test_private_names_of_pipeline.py fails when they change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import tree


class StageLayer(keras.layers.Layer):
    """Runs the nodes of one stage. A layer, so that they are called in one context, as in the model.

    Args:
        index: the stage's number.
        nodes: nodes of the model's graph, in the order of computation.
        arriving: the symbolic tensors that come from the stage before.
        leaving: those that go to the next stage, or the model's outputs.
        model_inputs: the model's symbolic inputs.
    """

    def __init__(
        self, index: int, nodes: Sequence[Any], arriving: Sequence[Any], leaving: Sequence[Any], model_inputs: Sequence[Any]
    ):
        super().__init__(name=f"stage_{index}", autocast=False)
        self.supports_masking = True
        self.index = index
        self.arriving = tuple(arriving)
        self.leaving = tuple(leaving)
        self._nodes = tuple(nodes)
        self._model_inputs = tuple(model_inputs)
        self.operations = list(dict.fromkeys(node.operation for node in nodes))
        self.built = True

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    def call(self, arriving: Sequence[Any], model_inputs: Sequence[Any], training: bool | None = None) -> list[Any]:
        """Returns the values of `leaving` from those of `arriving` and of the model's inputs."""
        values = dict(zip(map(id, self._model_inputs), model_inputs, strict=True))
        values.update(zip(map(id, self.arriving), arriving, strict=True))
        for node in self._nodes:
            values.update(zip(map(id, node.outputs), run_node(node, values, training), strict=True))
        return [values[id(tensor)] for tensor in self.leaving]

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Returns no mask: the layers give theirs to what they return."""

    def added_losses(self) -> list[Any]:
        """Returns what the layers gave `add_loss` in the last call, activity regularizers among it."""
        return [loss for layer in self._flatten_layers() for loss in layer._get_own_losses()]

    def state(self) -> list[keras.Variable]:
        """Returns the variables that the layers write themselves: statistics, and the states of random numbers."""
        return [variable for variable in self.variables_of_operations() if not variable.trainable]

    def variables_of_operations(self) -> list[keras.Variable]:
        """Returns the weights and other variables of the stage's layers, each once."""
        found = [v for operation in self.operations if isinstance(operation, keras.layers.Layer) for v in operation.variables]
        return list({id(variable): variable for variable in found}.values())


def nodes_in_order(module: keras.Model) -> list[Any]:
    """Returns the nodes of a functional model in the order of computation, without its inputs."""
    by_depth = module._nodes_by_depth
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if node.operation and not node.is_input]


def run_node(node: Any, values: Mapping[int, Any], training: bool | None) -> list[Any]:
    """Calls the operation of a node and returns its outputs, flat.

    Args:
        node: a node of a functional model.
        values: what the node's symbolic inputs are, by their `id`.
        training: for a layer that takes it; None: as the model was made.
    """
    args, kwargs = node.arguments.fill_in(values)
    if training is not None and "training" in getattr(node.operation, "_call_context_args", ()):
        kwargs["training"] = training
    return tree.flatten(node.operation(*args, **kwargs))


def split(module: keras.Model, cuts: Sequence[int]) -> list[StageLayer]:
    """Cuts a functional model in stages.

    Args:
        module: a functional model.
        cuts: places in `nodes_in_order(module)` before which a new stage begins, ascending.
    """
    nodes = nodes_in_order(module)
    model_inputs = {id(tensor) for tensor in module.inputs}
    made_at: dict[int, int] = {}
    needed_until: dict[int, int] = {}
    tensors: dict[int, Any] = {}
    bounds = [0, *cuts, len(nodes)]
    groups = [nodes[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
    for stage, group in enumerate(groups):
        for node in group:
            for tensor in node.input_tensors:
                needed_until[id(tensor)] = stage
            for tensor in node.outputs:
                made_at[id(tensor)], tensors[id(tensor)] = stage, tensor
    for tensor in module.outputs:
        needed_until[id(tensor)] = len(groups)
    stages, arriving = [], []
    for stage, group in enumerate(groups):
        if stage == len(groups) - 1:
            leaving = list(module.outputs)
        else:
            passing = (key for key, made in made_at.items() if made <= stage < needed_until.get(key, -1))
            leaving = [tensors[key] for key in passing if key not in model_inputs]
        stages.append(StageLayer(stage, group, arriving, leaving, module.inputs))
        arriving = leaving
    return stages
