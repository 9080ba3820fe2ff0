"""Level 7: the strategies, which compose everything below."""

from tfdist import keras_hooks
from tfdist.pipeline import PipelineModel
from tfdist.strategy.multi_worker_strategy import MultiWorkerShardedStrategy
from tfdist.strategy.sharded_strategy import ShardedStrategy

# Outside every strategy, too, a `PipelineModel` needs the losses of microbatches.
PipelineModel.change_keras = staticmethod(keras_hooks.install)

__all__ = ["MultiWorkerShardedStrategy", "ShardedStrategy"]
