"""Whether rows meet in a `tf.custom_gradient` of the user's: each device has the gradients of its own rows there.

    @tf.custom_gradient
    def limited(x):
        return x, lambda upstream: upstream / tf.norm(upstream)     the norm of a device's rows: told
        return x, lambda upstream: tf.clip_by_norm(upstream, 1.0, axes=[-1])     of each row: exact

Seen in the operations that such a function makes while a tape asks it: a tape names its own, and not those.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram
from tfdist.graphs import tape
from tfdist.losses.given_batch import is_given_everywhere
from tfdist.losses.row_meetings import RowMeetings
from tfdist.losses.static_rows import has_rows
from tfdist.sharding.row_kinds import RowKind, of_collective


class _Told:
    """Whether it has been told in a rank's program; an attachment of the program."""

    def __init__(self, program: RankProgram):
        del program
        self.is_told = False


def has_custom_gradients(program: RankProgram) -> bool:
    """Whether gradients may go back through a `tf.custom_gradient` of the user's, as far as the graph has come."""
    found = (op for op in program.graph.get_operations() if op.type == "IdentityN")
    return any(op.node_def.attr["_gradient_op_type"].s.startswith(b"CustomGradient-") for op in found)


@contextlib.contextmanager
def warned_of(program: RankProgram | None) -> Iterator[None]:
    """A block in which a tape takes gradients in `program`. Warns, once for a trace, if rows meet in a custom gradient.

    One rank of a process does it for all. In an eager run there is no graph, and nothing is known.
    """
    if program is None or program.is_eager or program.local_index or program.here() is None or not has_custom_gradients(program):
        yield
        return
    start = len(program.graph.get_operations())
    yield
    told = program.attachment(_Told)
    made = [op for op in program.graph.get_operations()[start:] if not tape.is_backward(op)]
    if told.is_told or is_given_everywhere() or not _rows_meet(made, program):
        return
    told.is_told = True
    warnings.warn(
        errors.message(
            "In the gradient function of a `tf.custom_gradient` rows of the batch meet: it looks at what comes back to all "
            "together (a norm, a mean). Each device has a part of the rows, and gives it that part alone.",
            fix="Look at each row by itself (`axis=-1`), or reduce over the devices what is of all rows: "
            '`tfdist.collectives.all_reduce(x, "data")`.',
        ),
        stacklevel=2,
    )


def _rows_meet(made: list[tf.Operation], program: RankProgram) -> bool:
    names = {op.name for op in made}

    def of_source(x: tf.Tensor) -> RowKind | tf.Tensor | None:
        found = of_collective(x, program)
        if found is RowKind.SAME or x.op.name in names:
            return found
        is_of_rows = x.shape.rank is None or x.shape.rank > 0 and (x.shape[0] is None or has_rows(x, program))
        return RowKind.ROWS if is_of_rows else RowKind.SAME

    meetings = RowMeetings(of_source)
    return any(meetings.found_in(output) for op in made for output in op.outputs)
