"""The note of an error of shapes in the function of a rank, which may have wanted all rows of a batch."""

import contextlib
import re
import weakref
from collections.abc import Iterator

import tensorflow as tf

from tfdist.graphs.calls import around_calls
from tfdist.graphs.walks import line_of_user
from tfdist.mesh import DeviceMesh

_OF_SHAPES = re.compile(
    "Dimensions? .*must be equal|[Ii]ncompatible shapes|are incompatible|must be broadcastable|size-incompatible|Cannot reshape"
)
_OF_AXES = re.compile(
    "slice index .* out of bounds|must be evenly divisible|list index out of range|Cannot infer argument `num`|values to unpack"
    "|requires a multiple of"
)
_FIRST_SIZES = re.compile(r"(?<!\w)\[(\d+)[,\]]")
_NODE = re.compile(r"\{\{node (?:gradient_tape/)?([^}]+)\}\}")
_NOTE = (
    "Under this strategy each device has a part of the rows of a batch{numbers}. A number of rows that is written into the step "
    "is that of the whole batch: write `tf.shape(x)[0]`. The first axis is the batch: let arrays (2, rows, ...) be "
    "(rows, 2, ...). If an operation needs all rows, as a graph convolution over the nodes of one graph does, give every device "
    "the whole batch (`model.train_on_batch`), or gather the rows before it: "
    "`tfdist.collectives.all_gather(x, uneven=True)`."
)


@contextlib.contextmanager
def explaining(mesh: DeviceMesh) -> Iterator[None]:
    """A block in which an error about shapes says that each device has a part of the rows."""
    try:
        yield
    except (IndexError, ValueError) as error:
        kind, said = type(error), str(error)
        if kind not in (IndexError, ValueError) or mesh.data_parallel_size == 1 or not _may_be_of_rows(said):
            raise
        raise kind(f"{said}\n\n{_note(said)}") from error


def explain_at_calls(mesh: DeviceMesh, graph: tf.Graph) -> None:
    """Has an error about shapes that the function of `graph` raises when it runs say that, in a note, with the line of code."""
    here = weakref.ref(graph)

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            if _may_be_of_rows(error.message) and (traced := here()) is not None:
                # Of a gradient's node the line of what it goes back from.
                nodes = [name for node in _NODE.findall(error.message) for name in (node, node.rpartition("/")[0])]
                lines = (line_of_user(traced, f"'{name}'") for name in nodes)
                error.add_note(_note(error.message, next(filter(None, lines), "")))
            raise

    if mesh.data_parallel_size > 1:
        around_calls(noted, key=("rows", here))


def _may_be_of_rows(message: str) -> bool:
    return bool(_OF_SHAPES.search(message) or _OF_AXES.search(message))


def _note(message: str, line: str = "") -> str:
    sizes = sorted({int(size) for size in _FIRST_SIZES.findall(message)}) if _OF_SHAPES.search(message) else []
    return _NOTE.format(numbers=f", here {sizes[0]}, where {sizes[-1]} are wanted{line}" if len(sizes) > 1 else line)
