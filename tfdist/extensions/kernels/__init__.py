"""Operations of Keras written anew, faster on CPUs or with less memory, and to rounding the same.

A strategy's `use_kernels` switches them (`keras_rows`). What each brings is measured in docs/notes/kernels.md; one that brings
less than 3 % of a step's time or memory goes.

* GELU keeps one tensor for the backward pass instead of three (`gelu`), and normalization over features one instead of two
  (`feature_norms`);
* attention, and projections of several axes, multiply matrices instead of reordering their axes each time (`matrix_products`);
* cross-entropy of integer labels goes over the logits in fewer passes (`crossentropy`).
"""

from tfdist.extensions.kernels import crossentropy, feature_norms, gelu, keras_rows, matrix_products

__all__ = ["crossentropy", "feature_norms", "gelu", "keras_rows", "matrix_products"]
