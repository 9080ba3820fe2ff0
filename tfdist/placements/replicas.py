"""The number of replicas, as `strategy.num_replicas_in_sync` returns it: in a rank's step it is known for what it is.

    loss / strategy.num_replicas_in_sync      one device divides by 1

It is an integer like any other. What it divides is a rank's share then, of a number that all ranks have; and ranks agree on a
number that each has of its own rows, in the place of the division.
"""

from typing import Any

import tensorflow as tf

from tfdist.collectives import rank_program
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import How, Partial


class ReplicaCount(int):
    """How many replicas there are."""

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)

    def __rtruediv__(self, other: Any) -> Any:
        return ReplicaPart(other / int(self), self) if type(other) in (int, float) else NotImplemented

    def as_tensor(self, dtype: tf.DType | None) -> tf.Tensor:
        """Returns it as a tensor, of which a rank's program knows what it is."""
        count = tf.constant(int(self), dtype)
        program = rank_program(peers_on="data")
        here = program.that_made(count) if program is not None and tf.is_symbolic_tensor(count) else None
        if here is not None:
            here.part(Facts).declare(count, Partial(How.REPLICAS))
        return count


class ReplicaPart(float):
    """A number over that of replicas."""

    count: ReplicaCount

    def __new__(cls, value: float, count: ReplicaCount) -> "ReplicaPart":
        made = super().__new__(cls, value)
        made.count = count
        return made

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)

    def as_tensor(self, dtype: tf.DType | None) -> tf.Tensor:
        """Returns it as a tensor, of which a rank's program knows what it is."""
        dtype = tf.as_dtype(dtype or tf.float32)
        if not dtype.is_floating:
            return tf.constant(float(self), dtype)
        return tf.constant(float(self) * int(self.count), dtype) / self.count.as_tensor(dtype)
