"""Level 8: which layers of a model to cut over the tensor ranks, and which way."""

from tfdist.tensor_plans.layer_cuts import LayerCut, resolve
from tfdist.tensor_plans.layer_kinds import cut_axes, cut_weights
from tfdist.tensor_plans.model_graph import CuttableLayer, ModelGraph, trace_model
from tfdist.tensor_plans.parallelize import parallelize
from tfdist.tensor_plans.plan import TensorPlan
from tfdist.tensor_plans.suggest import suggest_plan
from tfdist.tensor_plans.suggested_plan import SuggestedCut, SuggestedPlan

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
