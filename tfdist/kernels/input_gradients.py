"""Whether the gradient of a layer's input is wanted, for layers whose gradients are written out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.sharding import tape


def input_gradient_scope(
    program: RankProgram, x: tf.Tensor, parameters: Sequence[tf.Tensor]
) -> Callable[[], contextlib.AbstractContextManager]:
    """Returns the scope for the gradient of a layer's input, to be asked in the forward pass: `tape.backward_scope`, or none.

    None where a tape follows some of the parameters and not `x`, as in a model's first layer: the operations will not run, and
    stage 3 gathers no parameter again for them. In loops and nested functions tapes do not follow what is made there.
    """
    is_wanted = not program.exists_here(x) or tape.tapes_watching([x]) or not tape.tapes_watching(parameters)
    return tape.backward_scope if is_wanted else contextlib.nullcontext
