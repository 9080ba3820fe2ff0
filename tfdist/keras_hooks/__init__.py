"""Level 6.5: what tfdist changes in Keras and TensorFlow, and nothing else; a file for each part of Keras.

Importing it changes nothing: it fills the table (`table`), which a strategy installs, or what of tfdist is used before one.
Every replacement looks at the strategy first, and calls the original, or a plain function of the packages below.
"""

from tfdist.keras_hooks import callbacks, kernels, layers, losses, metrics, optimizers, saving, tensorflow, trainer, variables
from tfdist.keras_hooks.table import TABLE, Replacement, install, replaces
from tfdist.runtime import before_first_use

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

before_first_use(install)
