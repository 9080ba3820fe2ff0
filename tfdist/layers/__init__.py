"""Level 6: what Keras layers must know of the ranks. Importing it installs the seams (`randomness`).

Layers are used unchanged; nothing here is called by hand. Inside `strategy.run` of a tfdist strategy

* data ranks draw different random numbers from one seed: a dropout mask is not repeated on every part of the batch.
"""

from tfdist.layers import randomness

__all__ = ["randomness"]
