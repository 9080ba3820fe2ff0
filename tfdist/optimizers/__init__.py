"""Level 5: Keras optimizers on shards."""

from tfdist.optimizers.global_norm import clip_by_global_norm, global_norm
from tfdist.optimizers.ownership import owner_of
from tfdist.optimizers.support import elementwise

__all__ = ["elementwise"]
