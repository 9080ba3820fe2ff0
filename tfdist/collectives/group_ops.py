"""The collectives of one group of ranks, given a rank's program: what the parts of tfdist call that move tensors themselves.

Groups of one rank and tensors without elements return at once (an empty tensor crashes several of TensorFlow's kernels); all else
is the work of the group's transport. No gradients here: `ops` has those.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfdist import errors
from tfdist.collectives.emission import Emission
from tfdist.collectives.plan import Ranks, TensorLike
from tfdist.collectives.results import noted
from tfdist.collectives.transports.transport import transport_of

DTYPES = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def check_dtype(op: str, x: TensorLike) -> None:
    """Raises ValueError when the collective `op` cannot carry `x.dtype`."""
    if x.dtype not in DTYPES:
        raise errors.value_error(
            f"`{op}` carries {[dtype.name for dtype in DTYPES]}.",
            dtype=x.dtype.name,
            fix="Cast the tensor first, for example a bool to int32.",
        )


def check_static(op: str, x: TensorLike) -> None:
    """Raises ValueError when the shape of `x` is not known before it runs, as the collective `op` needs it."""
    if not x.shape.is_fully_defined():
        raise errors.value_error(f"`{op}` needs a static shape.", shape=x.shape, fix="Use `tf.ensure_shape`.")


def is_trivial(x: TensorLike, ranks: Ranks) -> bool:
    """Whether nothing has to move: a group of one rank, or a tensor that is known to be empty."""
    return len(ranks) == 1 or 0 in x.shape.as_list()


def all_reduce(program: Emission, x: tf.Tensor, ranks: Ranks, reduce_op: str, label: str) -> tf.Tensor:
    """Reduces `x` elementwise by `reduce_op` ("sum", "max", "min") over `ranks`."""
    if is_trivial(x, ranks):
        return tf.identity(x)
    with tf.device(program.device):
        reduced = transport_of(program, ranks).all_reduce(program, x, ranks, label, reduce_op)
        return noted(program, reduced, ranks, x, is_like=True)


def all_gather(program: Emission, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
    """Concatenates `x` of all `ranks`, of one shape, along axis 0, in group order."""
    if is_trivial(x, ranks):
        return tf.concat([x] * len(ranks), 0)
    with tf.device(program.device):
        return noted(program, transport_of(program, ranks).all_gather(program, x, ranks, label), ranks, x)


def all_gather_parts(program: Emission, parts: Sequence[tf.Tensor], ranks: Ranks, label: str) -> list[tf.Tensor]:
    """All-gathers vectors of one dtype in one collective; returns of each the (N, L) of all `ranks`, flattened or not."""
    if is_trivial(tf.TensorSpec([sum(part.shape[0] for part in parts)]), ranks):
        return [all_gather(program, part, ranks, label) for part in parts]
    with tf.device(program.device):
        gathered = transport_of(program, ranks).all_gather_parts(program, parts, ranks, label)
    return [noted(program, one, ranks, part) for one, part in zip(gathered, parts, strict=True)]


def all_to_all(program: Emission, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
    """Sends `x[i]` to the i-th of `ranks` and returns what each sent here, stacked: (N, ...) to (N, ...)."""
    if is_trivial(x, ranks):
        return tf.identity(x)
    with tf.device(program.device):
        return noted(program, transport_of(program, ranks).all_to_all(program, x, ranks, label), ranks, x, is_same=False)


def reduce_scatter(program: Emission, x: tf.Tensor, ranks: Ranks, label: str, *, dtype: tf.DType | None = None) -> tf.Tensor:
    """Sums `x`, of shape (N, ...), over `ranks`, and returns row i to the i-th rank: (N, ...) to (...), as `dtype` (None: x's).

    What is summed where it arrives travels in x's dtype; what is summed on the way, in the wider of the two.
    """
    dtype = dtype or x.dtype
    if is_trivial(x, ranks):
        return tf.cast(x[0], dtype)
    with tf.device(program.device):
        scattered = transport_of(program, ranks).reduce_scatter(program, x, ranks, label, dtype)
        return noted(program, scattered, ranks, x, is_same=False)


def reduce_scatter_parts(
    program: Emission, parts: Sequence[tf.Tensor], ranks: Ranks, label: str, *, dtype: tf.DType
) -> list[tf.Tensor]:
    """Reduce-scatters several (N, L) of one dtype in one collective; returns of each this rank's (L,), as `dtype`."""
    if is_trivial(tf.TensorSpec([sum(part.shape[1] for part in parts)]), ranks):
        return [reduce_scatter(program, part, ranks, label, dtype=dtype) for part in parts]
    with tf.device(program.device):
        scattered = transport_of(program, ranks).reduce_scatter_parts(program, parts, ranks, label, dtype)
    return [noted(program, one, ranks, part, is_same=False) for one, part in zip(scattered, parts, strict=True)]


def broadcast(
    program: Emission, x: TensorLike, shape: tf.TensorShape, ranks: Ranks, source: int, label: str, *, op: str = "broadcast"
) -> tf.Tensor:
    """Returns on every one of `ranks` the `x` of `source`, one of them, of static `shape`; elsewhere only its dtype matters.

    `op` is what the plan calls it.
    """
    like = tf.TensorSpec(shape, x.dtype)
    if is_trivial(like, ranks):
        return tf.identity(x) if program.rank == source else tf.zeros(shape, x.dtype)
    with tf.device(program.device):
        given = x if program.rank == source else like
        found = transport_of(program, ranks).broadcast(program, given, ranks, source, op, label)
        return noted(program, found, ranks, x if tf.is_tensor(x) else None, is_like=True)
