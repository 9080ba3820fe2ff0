"""Level 5: Keras optimizers on shards. Importing it installs the seam (`keras_seam`)."""

from tfdist.optimizers import keras_seam
from tfdist.optimizers.support import elementwise

__all__ = ["elementwise", "keras_seam"]
