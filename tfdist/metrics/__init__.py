"""Level 5: Keras metrics of the global batch. Importing it installs the seam (`keras_seam`)."""

from tfdist.metrics import keras_seam

__all__ = ["keras_seam"]
