"""Operations of Keras written anew, faster on CPUs or with less memory, and to rounding the same.

They are optional: a strategy's `use_kernels` switches them, and no other package of tfdist needs them. What each brings is
measured in docs/notes/kernels.md; one that brings less than 3 % of a step's time or memory goes.

* GELU keeps one tensor for the backward pass instead of three (`gelu`), and normalization over features one instead of two
  (`feature_norms`);
* attention, and projections of several axes, multiply matrices instead of reordering their axes each time (`matrix_products`);
* cross-entropy of integer labels goes over the logits in fewer passes (`crossentropy`).
"""

from tfdist.kernels import crossentropy, feature_norms, gelu, matrix_products

__all__ = ["crossentropy", "feature_norms", "gelu", "matrix_products"]
