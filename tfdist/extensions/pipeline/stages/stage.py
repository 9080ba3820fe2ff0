"""A stage: consecutive operations of a Keras model, which one rank of a pipeline computes.

    model inputs x ────┬───────────────┐          every rank has the model's inputs
                       │               │
    [ embed  block_0 ] ─ h ─> [ block_1  head ] ─> outputs
         stage 0       boundary    stage 1

The boundary of two stages is all that the later one needs of the earlier ones: usually one tensor. A skip connection over several
stages is carried along through the stages between.

The nodes of a functional model are private to Keras: test_private_names_of_pipeline.py fails when they change.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import tree


class StageLayer(keras.layers.Layer):
    """Runs the nodes of one stage, in order, on symbolic tensors that it gets from the stage before and of the model's inputs.

    It is a Keras layer, so that the nodes are called in one Keras context, as in the model.
    """

    def __init__(
        self,
        index: int,
        nodes: Sequence[Any],
        stage_inputs: Sequence[Any],
        stage_outputs: Sequence[Any],  # of the last stage: the model's outputs
        model_inputs: Sequence[Any],
    ):
        super().__init__(name=f"stage_{index}", autocast=False)
        self.supports_masking = True
        self.index = index
        self.stage_inputs = tuple(stage_inputs)
        self.stage_outputs = tuple(stage_outputs)
        self.nodes = tuple(nodes)
        self._model_inputs = tuple(model_inputs)
        self.operations = list(dict.fromkeys(node.operation for node in nodes))
        self.built = True

    def call(self, stage_inputs: Sequence[Any], model_inputs: Sequence[Any], training: bool | None = None) -> list[Any]:
        """Returns the values of `stage_outputs` from the values of `stage_inputs` and of the model's inputs."""
        values = dict(zip(map(id, self._model_inputs), model_inputs, strict=True))
        values.update(zip(map(id, self.stage_inputs), stage_inputs, strict=True))
        for node in self.nodes:
            values.update(zip(map(id, node.outputs), run_node(node, values, training), strict=True))
        return [values[id(tensor)] for tensor in self.stage_outputs]

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Returns no mask: the layers of the stage put their masks on the tensors that they return."""


def added_losses(layer: keras.layers.Layer) -> list[Any]:
    """Returns what layers in `layer` gave `add_loss` in their last call, activity regularizers among it; also without state."""
    return [loss for each in layer._flatten_layers() for loss in each._get_own_losses()]


def nodes_in_order(module: keras.Model) -> list[Any]:
    """Returns the nodes of a functional model in the order of computation, without the nodes of its inputs."""
    by_depth = module._nodes_by_depth
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if node.operation and not node.is_input]


def run_node(node: Any, values: Mapping[int, Any], training: bool | None) -> list[Any]:
    """Calls the operation of a node and returns the operation's outputs, flat.

    `values` has those of the node's inputs, by the `id` of the symbolic tensor. Without `training` a layer is called as in the
    model.
    """
    args, kwargs = node.arguments.fill_in(values)
    if training is not None and "training" in getattr(node.operation, "_call_context_args", ()):
        kwargs["training"] = training
    return tree.flatten(node.operation(*args, **kwargs))


def split_in_stages(module: keras.Model, split_points: Sequence[int]) -> list[StageLayer]:
    """Returns the stages of a functional model, of which a new one begins before each split point of `nodes_in_order`."""
    nodes = nodes_in_order(module)
    groups = [nodes[start:stop] for start, stop in itertools.pairwise([0, *split_points, len(nodes)])]
    made = {id(tensor): (stage, tensor) for stage, group in enumerate(groups) for node in group for tensor in node.outputs}
    needed_until = {id(tensor): stage for stage, group in enumerate(groups) for node in group for tensor in node.input_tensors}
    needed_until.update((id(tensor), len(groups)) for tensor in module.outputs)
    stages, stage_inputs = [], list[Any]()
    for stage, group in enumerate(groups):
        stage_outputs = [tensor for key, (made_at, tensor) in made.items() if made_at <= stage < needed_until.get(key, -1)]
        if stage == len(groups) - 1:
            stage_outputs = list(module.outputs)
        stages.append(StageLayer(stage, group, stage_inputs, stage_outputs, module.inputs))
        stage_inputs = stage_outputs
    return stages
