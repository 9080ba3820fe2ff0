"""A step that Keras's trainer runs on a rank, in `fit`, `evaluate`, `train_on_batch` or `test_on_batch`.

What a `train_step` or `test_step` computes of its data is, on a rank, computed of the rank's rows; what it calls a loss is the
rank's own mean over what it has. Rank r has the fraction w_r of the batch's rows. The loss of one device is then the sum of
w_r l_r over the ranks, for a plain mean over rows, for a penalty of weights, which is the same on all ranks, for a Keras loss
(see `global_losses`), and so for a sum of such terms.

    its gradient      each rank's counts w_r where gradients are reduced (`sharding.gradient_weight`)
    its logs          averaged with w_r
    its trackers      a number counts w_r in a `keras.metrics.Mean` (see `metrics.updates`)

A rank without rows has w_r = 0, and whatever it has computed, NaN as a mean of nothing too, counts nothing.

In Keras's own `train_step` the weight enters the gradient with the loss, and costs nothing. In one of the user's, who may do with
gradients what he likes before an optimizer has them, it enters where they are reduced.

Note: gradients across ranks. What one rank's gradient function sends to others (the statistics of a synchronized
BatchNormalization do) is of that rank's loss and must count that rank's weight. A tape then begins with the weight in the place
of 1, and what it returns is divided by the weight of the rank that has it, where reductions will multiply by that. So it is for
every tape that is asked for the gradient of a sharded parameter (stage 3), which leaves the tape reduced.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import RankProgram, rank_program
from tfdist.losses.batch_part import RankBatch
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.telling import as_mean
from tfdist.sharding.gradient_weight import GradientWeight


def trainer_step() -> RankRows | None:
    """Returns the rank's rows in the trainer's step that is traced or runs here; None elsewhere, and where one rank has all."""
    program = rank_program(peers_on="data")
    rows = None if program is None else program.part(RankRows)
    return None if rows is None or rows.model is None else rows


def losses_of(model: Any) -> contextlib.AbstractContextManager[None]:
    """A block in which losses are a rank's own means, as in a step of Keras's trainer that trains `model`."""
    program = rank_program(peers_on="data")
    return contextlib.nullcontext() if program is None else temporary.attributes(program.part(RankRows), model=model)


def of_trainer(model: Any, step: Callable[..., Any], is_keras_own: bool) -> Callable[..., Any]:
    """Returns `step`, the function of the data that Keras's trainer runs on each rank to train or test `model`, as a step of it.

    In a step that `is_keras_own` the rows are counted in the message of its first loss.
    """

    def marked(data: Any) -> Any:
        program = rank_program(peers_on="data")
        if program is None:
            return step(data)
        rows = program.part(RankRows)
        rows.model, rows.are_means = model, True
        program.part(GradientWeight).use(rows.weight)
        if is_keras_own:
            rows.sends_rows_along = True
            return step(data)
        rows.weight()  # before any branch or loop in which no message could be sent
        return _of_means(step(data), model, program)

    return marked


def _of_means(logs: Any, model: Any, program: RankProgram) -> Any:
    """Returns `logs`, what a step has returned, with numbers of which the ranks' own, by their weights, make up one device's."""

    def mean(path: tuple[Any, ...], x: Any) -> Any:
        if not (isinstance(x, tf.Tensor) and x.shape.rank == 0 and program.exists_here(x)):
            return x
        x = tf.cast(x, tf.int32) if x.dtype == tf.bool else x  # Keras logs a mean over the ranks
        name = "/".join(map(str, path))
        return as_mean(program, x, f"log/{name}", model, f"What a step of {type(model).__name__} returns as {name!r}")

    return keras.tree.pack_sequence_as(logs, [mean(path, x) for path, x in keras.tree.flatten_with_path(logs)])


def eager_losses(layer: Any) -> list[tf.Tensor] | None:
    """Returns the list of the losses of `layer` on the eager rank that runs here, as long-lived as the step; None: none runs.

    Eager ranks take turns, and would find each other's losses in the layer's own list; traced ones come one after the other.
    """
    program = rank_program()
    is_eager = program is not None and program.is_eager
    return program.part(RankBatch).added.setdefault(id(layer), []) if is_eager else None
