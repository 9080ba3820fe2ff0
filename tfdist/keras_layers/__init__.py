"""Level 6: what Keras's layers must know of the ranks.

Of the modules below nothing is called by hand. Inside `strategy.run` of a tfdist strategy

* data ranks draw different random numbers from one seed: a dropout mask is not repeated on every part of the batch
  (`randomness`);
* what a step assigns to variables is what one device would assign, or, as the moving statistics of `BatchNormalization`, averaged
  over the ranks at its end (`statistics`);
* `BatchNormalization(synchronized=True)` normalises over the global batch (`normalization`);
* convolutions and poolings work on ranks whose piece of the batch is empty (`empty_batches`).
"""

from tfdist.keras_layers import empty_batches, normalization, randomness, statistics
from tfdist.keras_layers.recomputed import recompute

__all__ = ["empty_batches", "normalization", "randomness", "recompute", "statistics"]
