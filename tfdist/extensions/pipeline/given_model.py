"""The argument of a `PipelineModel`: a model, or a list of layers or of stages; whether it can be trained in stages."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tfdist import errors

_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


@dataclasses.dataclass(frozen=True)
class Stage:
    """Layers that make up one stage, for `PipelineModel([Stage([...]), Stage([...]), ...])`.

    Attributes:
        layers: the layers, each of which computes on what the one before it returns.
    """

    layers: Sequence[keras.layers.Layer]


def module_of(given: Any, stages: Sequence[str | int] | None) -> tuple[keras.Model, Sequence[str | int] | None]:
    """Returns one model, and the `stages` at which it is to be split."""
    if isinstance(given, keras.Model):
        return given, stages
    given = list(given)
    if not any(isinstance(one, Stage) for one in given):
        return keras.Sequential(given), stages
    if stages is not None or not all(isinstance(one, Stage) and one.layers for one in given):
        raise errors.value_error(
            "With `Stage`s every entry of the list must be one, with at least one layer, and `stages` be left out.",
            layers_or_model=given,
            stages=stages,
        )
    sizes = [sum(not isinstance(layer, keras.layers.InputLayer) for layer in stage.layers) for stage in given]
    return (
        keras.Sequential([layer for stage in given for layer in stage.layers]),
        [sum(sizes[:index]) for index in range(1, len(sizes))],
    )


def check_module(module: keras.Model, blocks: Sequence[str] | None) -> None:
    """Raises NotImplementedError for a model that cannot be cut between layers, or does more than its stages would compute.

    Raises ValueError for `blocks` of one that is a graph of layers.
    """
    name, is_graph = type(module).__name__, isinstance(module, keras.Sequential) or hasattr(module, "_nodes_by_depth")
    if is_graph and blocks is not None:
        raise errors.value_error(
            "`blocks` are for subclassed models; a graph of layers is cut between any of them.",
            blocks=list(blocks),
            fix="Leave `blocks` out, and name the layers with which stages begin: `stages`.",
        )
    if not is_graph and blocks is None:
        raise errors.not_implemented(
            "Only a model that is a graph of layers can be cut in stages: a functional model, a Sequential or a list of layers; "
            "of a subclassed model it must be known which layers are its blocks.",
            layers_or_model=name,
            fix='Name the attribute that holds its blocks, as in `PipelineModel(model, blocks="blocks", num_microbatches=...)`.',
        )
    own = [step for step in _STEPS if getattr(type(module), step) is not getattr(keras.Model, step)]
    if own:
        raise errors.not_implemented(
            f"{name} computes its own {', '.join(map(repr, own))}, which would be left out: the steps of a pipeline are those of "
            "`PipelineModel`.",
            layers_or_model=name,
            fix="Override it in a subclass of `tfdist.PipelineModel` (`compute_loss`, `compute_metrics`; `train_step` by way of "
            "`self.compute_gradients`), and wrap the model in that.",
        )
    # A task of KerasHub does, which no pipeline does.
    if hasattr(module, "preprocess_samples") and getattr(module, "preprocessor", None) is not None:
        raise errors.not_implemented(
            f"{name} preprocesses the data that its `fit` is given; a `PipelineModel` takes what the model computes on.",
            layers_or_model=name,
            fix="Make the model with `preprocessor=None`, and preprocess the data: `dataset.map(preprocessor)`.",
        )
