"""Which tensors of a trace are a rank's shares of a loss already."""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.graphs.walks import before


class Shares:
    """The shares that one rank has computed in one trace; an attachment of the rank's program.

    A layer may give `add_loss` what a Keras loss returned, or something computed of it. Either is a share, and must not be
    weighted by rows as other means are. In an eager run only the share itself is recognised, not what is computed of it.
    """

    def __init__(self, program: RankProgram):
        self._program = program
        self._eager: list[tf.Tensor] = []
        self._names: set[str] = set()
        self._others: set[str] = set()  # operations that are known not to depend on a share made so far

    def add(self, share: tf.Tensor) -> tf.Tensor:
        """Notes that `share` is one, and returns it."""
        if self._program.is_eager:
            self._eager.append(share)
        elif self._program.exists_here(share):
            self._names.add(share.name)
        return share

    def is_share(self, value: tf.Tensor) -> bool:
        """Whether `value` is a share, or computed of one."""
        if self._program.is_eager:
            return any(value is share for share in self._eager)
        if not self._program.exists_here(value):
            return False
        seen = set()
        for tensor in before(value, lambda op: op.name in self._others):
            if tensor.name in self._names:
                return True
            seen.add(tensor.op.name)
        self._others |= seen
        return False
