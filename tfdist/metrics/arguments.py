"""The arguments of a metric's update: the tensors in them, with their masks, to be replaced by others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_MASK = "_keras_mask"  # where Keras keeps the mask of a tensor


class Arguments:
    """What `update_state` is called with.

    Attributes:
        tensors: the dense tensors among the arguments, then their masks.
        others: the ragged and sparse tensors.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]):
        self._structure = (tuple(args), kwargs)
        self._leaves = tf.nest.flatten(self._structure)
        dense = [leaf for leaf in self._leaves if isinstance(leaf, tf.Tensor)]
        self._masks = [mask for leaf in dense if isinstance(mask := getattr(leaf, _MASK, None), tf.Tensor)]
        self.tensors = [*dense, *self._masks]
        self.others = [leaf for leaf in self._leaves if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)]

    @property
    def have_no_rows(self) -> bool:
        """Whether it is known, before the step runs, that there are tensors of rows, and no row in any."""
        sizes = {tensor.shape[0] if tensor.shape.rank else None for tensor in self.tensors}
        return sizes == {0} and not self.others

    def replaced(self, tensors: Sequence[tf.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments, positional and by name, with `tensors` in the place of those that they have."""
        new = dict(zip(map(id, self.tensors), tensors, strict=True))
        leaves = [new.get(id(leaf), leaf) for leaf in self._leaves]
        for leaf in self._leaves:
            mask = getattr(leaf, _MASK, None) if isinstance(leaf, tf.Tensor) else None
            if isinstance(mask, tf.Tensor):
                setattr(new[id(leaf)], _MASK, new[id(mask)])
        args, kwargs = tf.nest.pack_sequence_as(self._structure, leaves)
        return args, kwargs
