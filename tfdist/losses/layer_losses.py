"""The losses that layers add, where ranks run eagerly.

A layer keeps what it adds in a list. Traced ranks are traced one after the other, each from the model's call to its gradients;
eager ranks take turns wherever they meet, and would find each other's losses there. So each keeps its own.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, rank_program


def _losses(_: RankProgram) -> dict[int, list[tf.Tensor]]:
    """Those of one eager rank, by the id of the layer; an attachment of its program."""
    return {}


def eager_losses(layer: Any) -> list[tf.Tensor] | None:
    """Returns the list of the losses of `layer` on the eager rank that runs here, as long-lived as the step; None: none runs."""
    program = rank_program()
    is_eager = program is not None and program.is_eager
    return program.attachment(_losses).setdefault(id(layer), []) if is_eager else None
