"""Layers: tensor-parallel ones, of which each rank has a part, and `recompute`."""

from tfdist.extensions import tensor
from tfdist.extensions.tensor import *  # noqa: F403
from tfdist.keras_layers import recompute as recompute

__all__ = sorted({*tensor.__all__, "recompute"} - {"regions"})
