"""Tapes within tapes: a gradient that is taken on the way back of another one, by the function of a `tf.custom_gradient`.

def back(upstream, variables):                       TensorFlow's `tf.recompute_grad` does so
    ... inner.gradient(again, variables, upstream)   a part of what the outer tape returns: nothing is weighted or summed here
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfdist import errors
from tfdist.collectives import RankProgram


class NestedTapes:
    """How many tapes of one rank's function are on their way back, one within the other; an attachment of its program."""

    def __init__(self, program: RankProgram):
        del program
        self._depth = 0

    @contextlib.contextmanager
    def going_back(self) -> Iterator[bool]:
        """A block in which a tape is asked for gradients; gives whether that is within another such block."""
        self._depth += 1
        try:
            yield self._depth > 1
        finally:
            self._depth -= 1

    def refuse(self, name: str) -> None:
        """Raises NotImplementedError where a gradient function's own tape has come to the sharded parameter `name`."""
        if self._depth > 1:
            raise errors.not_implemented(
                f"The function of a `tf.custom_gradient` (or `tf.recompute_grad`) takes the gradient of {name!r}, of which each "
                "device has a part, with a tape of its own.",
                fix="To compute a layer again in backward use `tfdist.layers.recompute(model, ...)` or `keras.remat`; else write "
                "the gradient down, or use `zero_stage=2`.",
            )
