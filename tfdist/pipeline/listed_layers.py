"""A model that is given as a list: of layers, or of stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tfdist import errors


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
