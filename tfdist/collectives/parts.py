"""The parts of a rank's state while its step is traced, or runs eagerly, and when each of them acts.

A program makes its parts in one place and in one order (`strategy.rank_parts`), and calls their methods in that order.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Part:
    """A part of one rank's state; made with the rank's program, as long-lived as it, and shared by the programs of branches."""

    def settle(self) -> None:
        """Does what must be done before the next collective is emitted."""

    def before_branch(self, read: Sequence[tf.Tensor]) -> None:
        """Does what must be done before TensorFlow makes a `tf.cond` of branches that `read` these tensors of the program."""

    def before_known(self, tensor: tf.Tensor) -> None:
        """Does what must be done before a loss or a log, `tensor`, is asked what it is of one device."""

    def summand(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns what the rank has of `tensor`, which stands for a sum over the ranks; None: it is none that the part knows."""
        return None

    def close(self, outputs: Any) -> None:
        """Does what is left when the rank's function has returned `outputs`, or the branch."""


class OfBranch(Part):
    """A part of which the program of a branch has its own."""


# The kinds that extensions add to every program; each is made after what the collectives keep.
OF_EXTENSIONS: list[type[Part]] = []
