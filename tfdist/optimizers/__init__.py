"""Level 5: Keras optimizers on shards. Importing it installs the seam (`keras_seam`)."""

from tfdist.optimizers import keras_seam
from tfdist.optimizers.clipping import global_norm
from tfdist.optimizers.ownership import owner_of
from tfdist.optimizers.support import elementwise

__all__ = ["elementwise", "global_norm", "keras_seam", "owner_of"]
