"""The Keras masks of what passes between stages, computed on every rank from the model's inputs.

A mask (of `Embedding(mask_zero=True)`, of `Masking`) follows from the model's inputs alone, which every rank has, so a mask need
not travel. Besides, a mask is known before the predictions are: a masked loss is a mean over the valid elements of all
microbatches.

    keras.src.backend.common.masking    private to Keras: test_private_names_of_pipeline.py
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.symbolic_scope import SymbolicScope

from tfdist import errors
from tfdist.extensions.pipeline.stages.stage import StageLayer
from tfdist.graphs import tape


class Masks:
    """The masks of what each stage hands on, as functions of the model's inputs. The stages' variables must exist.

    Raises:
        NotImplementedError: a mask depends on a weight, which other ranks do not have.
    """

    def __init__(self, stages: Sequence[StageLayer], model_inputs: Sequence[Any]):
        self._masks: dict[tuple[int, int], tf.Tensor] = {}
        # Tracing the whole model to find its masks is left out where no layer makes any.
        layers = [layer for stage in stages for layer in stage._flatten_layers()]
        if all(type(layer).compute_mask in _PASS_ON or not getattr(layer, "mask_zero", True) for layer in layers):
            return
        places: list[tuple[int, int]] = []

        def masks(*inputs: tf.Tensor) -> list[tf.Tensor]:
            found, passed_on = [], list[Any]()
            with SymbolicScope(), keras.StatelessScope():
                for stage in stages:
                    passed_on = stage(passed_on, list(inputs), training=False)
                    for place, tensor in enumerate(passed_on):
                        if get_keras_mask(tensor) is not None:
                            places.append((stage.index, place))
                            found.append(get_keras_mask(tensor))
            return found

        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in model_inputs]
        self._traced = tf.function(masks, autograph=False).get_concrete_function(*specs)
        graph = self._traced.graph
        self._inputs = graph.inputs[: len(specs)]
        self._masks = dict(zip(places, graph.outputs, strict=True))
        captured = {inside.op for outside, inside in graph.captures if outside.dtype == tf.resource}
        self._kept = {inside.name: outside for outside, inside in graph.captures if outside.dtype != tf.resource}
        for (stage, place), mask in self._masks.items():
            if tape.ancestors([mask], graph.get_operations(), by_control=False) & captured:
                raise errors.not_implemented(
                    "A mask between the stages of a pipeline must follow from the model's inputs, but that of "
                    f"{stages[stage].stage_outputs[place].name!r} depends on a weight.",
                    fix="Cut the model elsewhere (`stages`), so that the mask is used in the stage that makes it.",
                )

    def put(self, stage: int, stage_outputs: Sequence[tf.Tensor], model_inputs: Sequence[tf.Tensor]) -> None:
        """Puts masks on those outputs of a stage that should have one and have none, there or on the rank that received them."""
        places = [place for place, x in enumerate(stage_outputs) if (stage, place) in self._masks and get_keras_mask(x) is None]
        if not places:
            return
        if tf.executing_eagerly():
            found = dict(zip(self._masks, self._traced(*model_inputs), strict=True))
        else:
            given = zip(self._inputs, model_inputs, strict=True)
            known = {**self._kept, **{inside.name: x for inside, x in given}}
            operations = [operation for operation in self._traced.graph.get_operations() if operation.type != "Placeholder"]
            needed = tape.ancestors([self._masks[stage, place] for place in places], operations, by_control=False)
            tape.copy_all([operation for operation in operations if operation in needed], known)
            found = {(stage, place): known[self._masks[stage, place].name] for place in places}
        for place in places:
            set_keras_mask(stage_outputs[place], found[stage, place])


# `compute_mask` of layers that only combine or pass on the masks of what they are called on.
_PASS_ON = {
    layer.compute_mask
    for layer in (
        StageLayer,
        keras.layers.Layer,
        keras.layers.Add,  # and all that merge
        keras.layers.Concatenate,
        keras.layers.GlobalAveragePooling1D,
        keras.layers.Attention,
        keras.layers.RNN,
        keras.layers.Bidirectional,
    )
}
