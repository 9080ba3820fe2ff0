"""Layers that are computed again in backward instead of keeping what they compute."""

import re
from collections.abc import Sequence
from typing import Any

import keras
from keras.src.backend.common.remat import RematMode

from tfdist import errors
from tfdist.sharding import config_of, layers_within

_FULL = RematMode(mode="full", output_size_threshold=0, layer_names=())


def recompute(model: keras.Model, layers: str | Sequence[keras.Layer]) -> keras.Model:
    """Lets layers of a model be computed a second time in backward, so that what they compute is not kept until then.

    Of such a layer only what it takes and returns is kept from forward to backward. When backward comes to it, its forward runs
    again, once that of the layers after it is through: of one layer at a time all is there. It costs a forward of these layers
    in each step, a third more work at most, and hardly a message: at `zero_stage=3` the weights that backward gathers anyway
    serve both, but for those in front of a message between tensor ranks. Dropout draws its mask once, statistics move on once,
    and the results are those of the model as it was.

        model = build_gpt()                    # in `strategy.scope()`
        tfdist.recompute(model, "block")       # every layer that has "block" in its name
        model.compile(...)

    `keras.RematScope(mode="full")` around the making of a layer, and `keras.remat(function)`, do the same under a tfdist
    strategy; in a pipeline, too, where a stage with such layers is traced once for each microbatch. Steps that run eagerly keep
    everything. What loops, branches, nested `tf.function`s and messages between ranks return is kept.

    The mistake to avoid: naming each small layer instead of the block of them: a Dense layer by itself keeps little else than
    what it takes and returns.

    Args:
        model: made in the scope of a tfdist strategy; a `PipelineModel`, too, which has an argument of its own, `recompute=True`,
            for whole stages.
        layers: a regular expression that is searched in the path of each layer, such as "block"; of layers within each other the
            outermost is meant. Or the layers themselves.

    Returns:
        `model`.

    Raises:
        ValueError: the model was made in the scope of no tfdist strategy, or there is no such layer in it.

    Source: Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*; PyTorch's `checkpoint_wrapper`.
    """
    config = config_of(getattr(model, "distribute_strategy", None))
    if config is None:
        raise errors.value_error(
            "`model` must be a Keras model that was made in the scope of a tfdist strategy.",
            model=getattr(model, "name", model),
            fix="Make it in `strategy.scope()`.",
        )
    for layer in _found(model, layers):
        layer._remat_mode = _FULL
    return model


def is_recomputed(model: keras.Model) -> bool:
    """Whether a layer of the model is computed again in backward."""
    return any(getattr(layer, "_remat_mode", None) is not None for layer in layers_within(model))


def _found(model: keras.Model, layers: str | Sequence[keras.Layer]) -> list[Any]:
    within = layers_within(model)[1:]
    if isinstance(layers, str):
        matching = [layer for layer in within if re.search(layers, layer.path or layer.name)]
        inner = {id(part) for layer in matching for part in layers_within(layer)[1:]}
        found = [layer for layer in matching if id(layer) not in inner]
    else:
        found = list(layers)
    if not found or not {id(layer) for layer in found} <= {id(layer) for layer in within}:
        raise errors.value_error(
            "`layers` must match, or list, layers of the model.",
            layers=layers,
            fix=f"Its layers are {', '.join(dict.fromkeys(layer.path or layer.name for layer in within[:20]))}"
            f"{' ...' if len(within) > 20 else '.'} Build the model before, if a layer makes others when it is built.",
        )
    return found
