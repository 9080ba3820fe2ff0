"""Level 6.5: what tfdist changes in Keras and TensorFlow, and nothing else; a file for each part of Keras.

Importing it changes nothing: it fills the table (`table`), which a strategy installs, or what of tfdist is used before one.
Every replacement looks at the strategy first, and calls the original, or a plain function of the packages below.
The docstring of a replacement says what goes wrong without it.
"""

from tfdist.keras_hooks import (  # noqa: F401  each adds its rows to the table
    callbacks,
    layers,
    losses,
    metrics,
    optimizers,
    ragged,
    saving,
    tensorflow,
    trainer,
    variables,
)
from tfdist.keras_hooks.table import TABLE, Replacement, install
from tfdist.runtime import before_first_use

__all__ = ["TABLE", "Replacement", "install"]

before_first_use(install)
before_first_use(metrics.span_ranks)
