"""Level 8: which layers of a model to cut over the tensor ranks, and which way."""

from tfdist.planner.elementwise import is_elementwise_activation
from tfdist.planner.layer_kinds import CutAxes, cut_axes, cut_weights

__all__ = ["CutAxes", "cut_axes", "cut_weights", "is_elementwise_activation"]
