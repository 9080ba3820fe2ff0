"""Layers that treat each channel by itself: what may stand between two layers that are sharded by channels.

    conv, column ── BatchNormalization ── relu ── pooling ── conv, row

Pooling and padding do as they did before. A normalization has weights, a number for each channel: it is sharded with the channels
that it gets, in the role "column", and cannot be sharded anywhere else.
"""

from __future__ import annotations

import keras

_POOLINGS = [f"{kind}Pooling{rank}D" for kind in ("Average", "Max") for rank in (1, 2, 3)]
_GLOBAL = tuple(getattr(keras.layers, f"Global{name}") for name in _POOLINGS)
_LOCAL = (
    *(getattr(keras.layers, name) for name in _POOLINGS),
    keras.layers.Cropping2D,
    keras.layers.UpSampling2D,
    keras.layers.ZeroPadding2D,
)


def channel_axes(operation: keras.Operation) -> tuple[int, int] | None:
    """Returns the axes of the channels in the input and the output of a pooling or the like, None for every other operation."""
    if type(operation) not in _GLOBAL + _LOCAL:
        return None
    inputs = 1 if operation.data_format == "channels_first" else -1
    return inputs, -1 if type(operation) in _GLOBAL and not operation.keepdims else inputs
