"""How far a gradient has come from the tape to the optimizer; docs/design/gradient.md says who moves it on."""

import enum


class GradientState(enum.Enum):
    """A rank's part in the gradient of a parameter of P bytes, in a group of N data ranks.

    * SUMMAND: its own, as the tape has made it, of the parameter's shape: P bytes.
    * SHARD: its part of the sum, a flat shard (L,): P / N bytes.
    * WHOLE: the sum, of the parameter's shape, the same on all data ranks: P bytes.
    """

    SUMMAND = enum.auto()
    SHARD = enum.auto()
    WHOLE = enum.auto()

    @property
    def is_reduced(self) -> bool:
        """Whether it is, or is a part of, the sum over the data ranks."""
        return self is not GradientState.SUMMAND
