"""Layers that treat each channel by itself: what may stand between two layers that are sharded by channels.

    conv, column ── BatchNormalization ── relu ── pooling ── conv, row

Pooling and padding do as they did before. A normalization has weights, a number for each channel: it is sharded with the channels
that it gets, in the role "column", and cannot be sharded anywhere else.
"""

from __future__ import annotations

import keras

_GLOBAL = (
    keras.layers.GlobalAveragePooling1D,
    keras.layers.GlobalAveragePooling2D,
    keras.layers.GlobalAveragePooling3D,
    keras.layers.GlobalMaxPooling1D,
    keras.layers.GlobalMaxPooling2D,
    keras.layers.GlobalMaxPooling3D,
)
_LOCAL = (
    keras.layers.AveragePooling1D,
    keras.layers.AveragePooling2D,
    keras.layers.AveragePooling3D,
    keras.layers.Cropping2D,
    keras.layers.MaxPooling1D,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
    keras.layers.UpSampling2D,
    keras.layers.ZeroPadding2D,
)


def channel_axes(operation: keras.Operation) -> tuple[int, int] | None:
    """Returns the axes of the channels in the input and the output of a pooling or the like, None for every other operation."""
    if type(operation) not in _GLOBAL + _LOCAL:
        return None
    inputs = 1 if operation.data_format == "channels_first" else -1
    return inputs, -1 if type(operation) in _GLOBAL and not operation.keepdims else inputs
