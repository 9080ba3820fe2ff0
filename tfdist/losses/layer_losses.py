"""The losses that layers add, where ranks run eagerly.

A layer keeps what it adds in a list. Traced ranks are traced one after the other, each from the model's call to its gradients;
eager ranks take turns wherever they meet, and would find each other's losses there. So each keeps its own.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, rank_program


class LayerLosses:
    """What layers have added on one eager rank; an attachment of its program."""

    def __init__(self, program: RankProgram):
        del program
        self._losses: dict[int, list[tf.Tensor]] = {}

    def of(self, layer: Any) -> list[tf.Tensor]:
        """Returns the list of the losses of `layer`, which is as long-lived as the step."""
        return self._losses.setdefault(id(layer), [])


def eager_losses() -> LayerLosses | None:
    """Returns the losses of the eager rank that runs here, None where none does."""
    program = rank_program()
    return program.attachment(LayerLosses) if program is not None and program.is_eager else None
