"""Level 6.5: what tfdist changes in Keras and TensorFlow, and nothing else; a file for each part of Keras.

Importing it changes nothing: it fills the table (`table`), which a strategy installs. Every replacement looks at the strategy
first, and calls the original, or a plain function of the packages below.
"""

from tfdist.keras_hooks import callbacks, kernels, layers, losses, metrics, optimizers, saving, tensorflow, trainer, variables
from tfdist.keras_hooks.table import TABLE, Replacement, install, replaces

__all__ = [
    "TABLE",
    "Replacement",
    "callbacks",
    "install",
    "kernels",
    "layers",
    "losses",
    "metrics",
    "optimizers",
    "replaces",
    "saving",
    "tensorflow",
    "trainer",
    "variables",
]
