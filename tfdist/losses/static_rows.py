"""Which tensors have the rows of a rank's batch, where sizes are known when the step is traced.

The first dimension tells:

    as many rows as a tensor of the batch                        the batch's own
    tf.concat([labelled, unlabelled], axis=0), and what is       those of both parts: as many as both have
    computed of it
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.collectives.results import Results
from tfdist.graphs.walks import before


def has_rows(x: tf.Tensor, program: RankProgram) -> bool:
    """Whether the first dimension of `x` has the size of the rows of the rank's batch, or of tensors of rows put together."""
    leaves = tf.nest.flatten(program.arguments)
    rows = {leaf.shape[0] for leaf in leaves if tf.is_tensor(leaf) and leaf.shape.rank and leaf.shape[0] is not None}
    return _has_rows(x, rows, program.attachment(Results))


def _has_rows(x: tf.Tensor, rows: set[int], results: Results) -> bool:
    if not x.shape.rank or x.shape[0] is None:
        return False
    return x.shape[0] in rows or tf.is_symbolic_tensor(x) and _is_of_joined_rows(x, rows, results)


def _is_of_joined_rows(x: tf.Tensor, rows: set[int], results: Results) -> bool:
    """Whether `x` is computed of tensors of rows that were put together, and has as many as they have."""
    sources = (source for source, _ in before(x, inputs_of=results.own_inputs_of))
    return any(
        all(_has_rows(part, rows, results) for part in source.op.inputs[:-1])
        for source in sources
        if source.op.type == "ConcatV2" and source.shape.rank and source.shape[0] == x.shape[0] and _is_along_rows(source)
    )


def _is_along_rows(joined: tf.Tensor) -> bool:
    axis = tf.get_static_value(joined.op.inputs[-1])
    return axis is not None and int(axis) in (0, -joined.shape.rank)
