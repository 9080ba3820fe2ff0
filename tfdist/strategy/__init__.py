"""Level 7: the strategies, which compose everything below."""

from tfdist.strategy.multi_worker_strategy import MultiWorkerShardedStrategy
from tfdist.strategy.sharded_strategy import ShardedStrategy
