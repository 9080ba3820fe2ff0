"""Level 8: which layers of a model to shard over the tensor ranks, and which way."""

from tfdist.extensions.tensor.plans.layer_kinds import sharded_axes, sharded_weights
from tfdist.extensions.tensor.plans.layer_shardings import LayerSharding, resolve
from tfdist.extensions.tensor.plans.model_graph import ModelGraph, ShardableLayer, trace_model
from tfdist.extensions.tensor.plans.plan import TensorPlan
from tfdist.extensions.tensor.plans.sharded_model import parallelize
from tfdist.extensions.tensor.plans.suggest import suggest_plan
from tfdist.extensions.tensor.plans.suggested_plan import SuggestedPlan, SuggestedSharding
