"""Level 6: what Keras layers must know of the ranks. Importing it installs the seams.

Layers are used unchanged; nothing here is called by hand. Inside `strategy.run` of a tfdist strategy

* data ranks draw different random numbers from one seed: a dropout mask is not repeated on every part of the batch
  (`randomness`);
* running statistics, such as those of `BatchNormalization`, are averaged over the ranks at the end of a step (`statistics`);
* `BatchNormalization(synchronized=True)` normalises over the global batch (`normalization`);
* convolutions and poolings work on ranks whose piece of the batch is empty (`empty_batches`).
"""

from tfdist.layers import empty_batches, normalization, randomness, statistics

__all__ = ["empty_batches", "normalization", "randomness", "statistics"]
