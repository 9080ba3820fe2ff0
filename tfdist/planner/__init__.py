"""Level 8: which layers of a model to cut over the tensor ranks, and which way."""

from tfdist.planner.elementwise import is_elementwise_activation
from tfdist.planner.layer_cuts import LayerCut, resolve
from tfdist.planner.layer_kinds import CutAxes, cut_axes, cut_weights
from tfdist.planner.model_graph import CuttableLayer, ModelGraph, trace_model
from tfdist.planner.plan import TensorPlan

__all__ = [
    "CutAxes",
    "CuttableLayer",
    "LayerCut",
    "ModelGraph",
    "TensorPlan",
    "cut_axes",
    "cut_weights",
    "is_elementwise_activation",
    "resolve",
    "trace_model",
]
