"""Arguments of ranks of which some have no rows; and what is said beside an error of shapes in the function of a rank, which may
have wanted all rows of a batch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import values

from tfdist.mesh import DeviceMesh

_OF_SHAPES = re.compile(
    "Dimensions? .*must be equal|[Ii]ncompatible shapes|are incompatible|must be broadcastable|size-incompatible"
)
_NOTE = (
    "Under this strategy each device has a part of the rows of a batch. If an operation needs all of them, as a graph "
    "convolution over the nodes of one graph does, give every device the whole batch (`model.train_on_batch`), or gather the "
    "rows before it: `tfdist.collectives.all_gather(x, uneven=True)`."
)


def without_static_none(argument: Any) -> Any:
    """Returns `argument`, of `strategy.run`, of which no rank's number of rows is known to the trace if some rank's is known to be
    none: sizes of none cannot be told from others, and no index is in them."""
    if not isinstance(argument, values.PerReplica) or not all(tf.is_symbolic_tensor(x) for x in argument.values):
        return argument
    rows = {x.shape[0] if x.shape.rank else None for x in argument.values}
    if 0 not in rows or rows == {0}:
        return argument
    return values.PerReplica([tf.compat.v1.placeholder_with_default(x, [None, *x.shape[1:]]) for x in argument.values])


@contextlib.contextmanager
def told(mesh: DeviceMesh) -> Iterator[None]:
    """A block in which a ValueError about shapes says that each device has a part of the rows."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError or mesh.data_parallel_size == 1 or not _OF_SHAPES.search(str(error)):
            raise
        raise ValueError(f"{error}\n\n{_NOTE}") from error
