"""Level 8: which layers of a model to cut over the tensor ranks, and which way."""

from tfdist.planner.layer_cuts import LayerCut, resolve
from tfdist.planner.layer_kinds import cut_axes, cut_weights
from tfdist.planner.model_graph import CuttableLayer, ModelGraph, trace_model
from tfdist.planner.parallelize import parallelize
from tfdist.planner.plan import TensorPlan
from tfdist.planner.suggest import suggest_plan
from tfdist.planner.suggested_plan import SuggestedCut, SuggestedPlan

__all__ = [
    "CuttableLayer",
    "LayerCut",
    "ModelGraph",
    "SuggestedCut",
    "SuggestedPlan",
    "TensorPlan",
    "cut_axes",
    "cut_weights",
    "parallelize",
    "resolve",
    "suggest_plan",
    "trace_model",
]
