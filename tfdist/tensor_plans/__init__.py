"""Level 8: which layers of a model to shard over the tensor ranks, and which way."""

from tfdist.tensor_plans.layer_kinds import sharded_axes, sharded_weights
from tfdist.tensor_plans.layer_shardings import LayerSharding, resolve
from tfdist.tensor_plans.model_graph import ModelGraph, ShardableLayer, trace_model
from tfdist.tensor_plans.parallelize import parallelize
from tfdist.tensor_plans.plan import TensorPlan
from tfdist.tensor_plans.suggest import suggest_plan
from tfdist.tensor_plans.suggested_plan import SuggestedPlan, SuggestedSharding
