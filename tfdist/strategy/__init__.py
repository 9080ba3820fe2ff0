"""Level 7: the strategies, which compose everything below. Importing it installs the seam (`keras_seam`)."""

from tfdist.strategy import keras_seam
from tfdist.strategy.multi_worker_strategy import MultiWorkerShardedStrategy
from tfdist.strategy.sharded_strategy import ShardedStrategy

__all__ = ["MultiWorkerShardedStrategy", "ShardedStrategy", "keras_seam"]
