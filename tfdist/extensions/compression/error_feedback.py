"""Error feedback: the losses of compressed gradients, kept and added to the next ones.

    rank                   x = g + e            its gradient, and what its messages have not brought across so far
    message                Q(x), encoded        decoded everywhere as D(x)
    the optimizer steps    e <- x - D(x)        kept in few bytes itself (`residuals.Residual`)

So what a rank has been sent lags behind what it should have been, and does not drift away from it. Sums that travel in two
messages (stage 0, and between sharding groups) are encoded twice; what the second one loses is kept by the rank that has formed
the sum, in its own e.

A residual is written by the step that takes the sums, where that runs: not when the step is skipped, and not for sums that no
optimizer takes. Of several sums of one variable in one step, each goes on from what the one before it has lost.

Source: Seide et al. 2014; Karimireddy et al. 2019 ("Error Feedback Fixes SignSGD").
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import Part, RankProgram
from tfdist.collectives.where import is_visible
from tfdist.sharding.compression import Compressor


@dataclasses.dataclass
class _Loss:
    """The loss of a variable's messages, encoded, and the graphs of the steps that have written it."""

    words: tf.Tensor
    variable: Any
    written_in: list[tf.Graph] = dataclasses.field(default_factory=list)


class ErrorFeedback(Part):
    """The losses of one rank's messages in one trace; a part of the rank's state.

    Attributes:
        encoded: the operations after which the gradients of the last message are no longer needed in full, since all that is
            made of them is there; none where they travel exactly.
    """

    def __init__(self, program: RankProgram):
        self._program = program
        self.encoded: list[tf.Operation] = []
        self._losses: dict[int, _Loss] = {}  # by the variable's id
        self._without: dict[int, Any] = {}  # variables of which a sum was taken before they had a residual

    def added(self, variables: Sequence[Any], parts: Sequence[tf.Tensor], compressors: Sequence[Compressor]) -> list[tf.Tensor]:
        """Returns `parts`, of float32, what this rank has of sums of gradients, with what is kept of each variable."""
        sent = []
        for variable, part, compressor in zip(variables, parts, compressors, strict=True):
            if compressor.feedback is not None and variable.residual is None:
                self._without[id(variable)] = variable
            elif compressor.feedback is not None:
                part = part + variable.residual.decoded(self._words(variable), part.shape)
            sent.append(part)
        return sent

    def note(self, variables: Sequence[Any], losses: Sequence[tf.Tensor | None], words: tf.Tensor | None) -> None:
        """Notes what the message of `words` lacks of each of the parts that it sends; None where nothing is kept."""
        kept = [] if words is None else [words]
        for variable, lost in zip(variables, losses, strict=True):
            if lost is not None and variable.residual is not None:
                kept.append(variable.residual.encoded(lost))
                self._losses[id(variable)] = _Loss(kept[-1], variable)
        self.encoded = [one.op for one in kept if tf.is_symbolic_tensor(one)]

    def write(self, variables: Sequence[Any]) -> None:
        """Lets `variables` keep what the sums have lost with which they are updated here."""
        graph = tf.compat.v1.get_default_graph()
        for variable in variables:
            if variable.residual is not None and id(variable) in self._without:
                raise errors.runtime_error(
                    f"The gradient of {variable.name!r} was summed in this step before its optimizer was built, which makes room "
                    "for what compression loses.",
                    fix="Build it before the first step: `optimizer.build(model.trainable_variables)` in `strategy.scope()`.",
                )
            lost = self._losses.get(id(variable))
            if lost is not None and is_visible(lost.words) and graph not in lost.written_in:
                lost.written_in.append(graph)
                variable.residual.part(self._program).assign(lost.words, read_value=False)

    def _words(self, variable: Any) -> tf.Tensor:
        """Returns what is kept of `variable`, encoded: what an earlier sum of this step has lost, if no step has taken it yet."""
        lost = self._losses.get(id(variable))
        if lost is not None and is_visible(lost.words) and not lost.written_in:
            return lost.words
        return variable.residual.part(self._program).value()
