"""An action of a rank of a pipeline in one slot of its schedule: one phase of one stage for one microbatch.

2F0    stage 2, forward, microbatch 0
"""

import dataclasses
import enum
import re

from tfdist import errors

ACTION_TEXT = re.compile(r"([0-9]+)([FBIW])([0-9]+)")


class Phase(enum.Enum):
    """The computation of an action, and the memory that it leaves in use. The value is the letter of the text form.

    * `FORWARD`, F: computes the output of the stage. From here on the stage holds the microbatch's activations.
    * `BACKWARD`, B: computes the gradients of the stage's input and weights, and frees the activations.
    * `BACKWARD_INPUT`, I: computes the gradient of the stage's input only, which is all that the stage before waits for. It
      frees nothing.
    * `BACKWARD_WEIGHT`, W: computes the gradients of the weights, some time after I, and frees the activations.

    A microbatch goes back through a stage by B, or by I and W.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclasses.dataclass(frozen=True)
class Action:
    """One phase of one stage for one microbatch; `str` and `parse` are inverses.

    Args:
        stage_index: the stage, from 0.
        phase: what the action computes.
        microbatch: the microbatch, from 0.

    Raises:
        ValueError: a number is not an integer of at least 0, or `phase` is not a `Phase`.
    """

    stage_index: int
    phase: Phase
    microbatch: int

    def __post_init__(self) -> None:
        for name in ("stage_index", "microbatch"):
            errors.check_integer(name, getattr(self, name), least=0)
        if not isinstance(self.phase, Phase):
            raise errors.value_error("`phase` must be a `Phase`.", phase=self.phase, fix="`Action.parse` reads the letters.")

    def __str__(self) -> str:
        return f"{self.stage_index}{self.phase.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Returns the action that `text` names; the inverse of `str`.

        Raises:
            ValueError: `text` is not a stage, a letter of `Phase` and a microbatch.
        """
        match = ACTION_TEXT.fullmatch(text)
        if match is None:
            raise errors.value_error(
                "`text` must be a stage, one of the letters F, B, I and W, and a microbatch.",
                text=text,
                fix='For instance "2F0": stage 2, forward, microbatch 0.',
            )
        return cls(int(match[1]), Phase(match[2]), int(match[3]))
