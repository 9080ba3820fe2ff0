"""What is said beside an error of shapes in the function of a rank, which may have wanted all rows of a batch."""

import contextlib
import re
from collections.abc import Iterator

from tfdist.mesh import DeviceMesh

_OF_SHAPES = re.compile(
    "Dimensions? .*must be equal|[Ii]ncompatible shapes|are incompatible|must be broadcastable|size-incompatible"
)
_NOTE = (
    "Under this strategy each device has a part of the rows of a batch. If an operation needs all of them, as a graph "
    "convolution over the nodes of one graph does, give every device the whole batch (`model.train_on_batch`), or gather the "
    "rows before it: `tfdist.collectives.all_gather(x, uneven=True)`."
)


@contextlib.contextmanager
def told(mesh: DeviceMesh) -> Iterator[None]:
    """A block in which a ValueError about shapes says that each device has a part of the rows."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError or mesh.data_parallel_size == 1 or not _OF_SHAPES.search(str(error)):
            raise
        raise ValueError(f"{error}\n\n{_NOTE}") from error
