"""Collectives over a mesh axis, each differentiable with its adjoint.

All of them are called by every rank of a group, in the function that `strategy.run` runs. There is a `tf.function` around
`strategy.run`; without one they work too, for debugging: slowly.

    all_reduce       forward: sum over the group; backward: sum over the group
    all_gather       forward: concatenate along axis 0; backward: reduce-scatter
    reduce_scatter   forward: sum, keep this rank's rows; backward: all-gather
    all_to_all       forward: exchange rows; backward: exchange them back
    broadcast        forward: copy the root's value; backward: sum at the root, zero elsewhere

A group of one rank returns its input. Dtypes: float32, float64, float16, bfloat16, int32, int64 (integers have no gradient).
"""

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import group_ops
from tfdist.collectives.instance_keys import power_of_two
from tfdist.collectives.plan import Ranks
from tfdist.collectives.program import RankProgram
from tfdist.collectives.results import noted
from tfdist.collectives.transports.kernel_settings import with_zeros
from tfdist.collectives.where import current_program, is_built_outside
from tfdist.custom_gradients import with_adjoint
from tfdist.graphs import tape

_REDUCE_OPS = ("sum", "mean", "max", "min")


def all_reduce(x: tf.Tensor, mesh_axis: str = "data", *, reduce_op: str = "sum", label: str = "all_reduce") -> tf.Tensor:
    """Reduces `x` elementwise over the group of `mesh_axis`; every rank gets the result.

    Args:
        x: tensor of one static shape on all ranks.
        mesh_axis: "data", "pipe" or "tensor".
        reduce_op: "sum", "mean", "max" or "min". The gradient of "max" and "min" is not defined here and raises.
        label: what it is for, shown in the plan.

    Returns:
        A tensor like `x`.

    Raises:
        ValueError: unknown `reduce_op` or `mesh_axis`, a shape that is not static, or a dtype that collectives do not
            carry.
        RuntimeError: called outside `strategy.run`, or ranks disagree on the shape.

    Source: ring all-reduce, Patarasuk and Yuan 2009; its adjoint is itself.
    """
    if reduce_op not in _REDUCE_OPS:
        raise errors.value_error(f"`reduce_op` must be one of {_REDUCE_OPS}.", reduce_op=reduce_op)
    if is_built_outside():
        return tf.identity(x)
    program, x, ranks = _enter("all_reduce", x, mesh_axis)
    group_ops.check_static("all_reduce", x)
    if reduce_op == "mean":
        if not x.dtype.is_floating:
            raise errors.value_error('`reduce_op="mean"` needs a floating dtype.', dtype=x.dtype.name)
        return all_reduce(x, mesh_axis, label=label) / len(ranks)

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        if reduce_op != "sum":
            raise errors.not_implemented(
                "`all_reduce` has a gradient for sums and means only.",
                reduce_op=reduce_op,
                fix="Wrap its input in `tf.stop_gradient`.",
            )
        return all_reduce(upstream, mesh_axis, label=f"{label}/gradient")

    return with_adjoint(lambda x: group_ops.all_reduce(program, x, ranks, reduce_op, label), gradient, x)


def all_gather(x: tf.Tensor, mesh_axis: str = "data", *, uneven: bool = False, label: str = "all_gather") -> tf.Tensor:
    """Concatenates the group's tensors along axis 0, in group order; every rank gets the result.

    Args:
        x: tensor of rank at least 1, the same shape on all ranks (with `uneven`, axis 0 may differ, and may be empty).
        mesh_axis: "data", "pipe" or "tensor".
        uneven: exchange the lengths first. It is implied when axis 0 of `x` is known at run time only.
        label: what it is for, shown in the plan.

    Returns:
        A tensor of shape `(sum of the ranks' x.shape[0], *x.shape[1:])`.

    Raises:
        ValueError: `x` is a scalar, an inner dimension is not static, or a dtype that collectives do not carry.
        RuntimeError: called outside `strategy.run`, or ranks disagree on the shape.
    """
    if is_built_outside():
        x = tf.convert_to_tensor(x)
        return tf.compat.v1.placeholder_with_default(x, [None, *x.shape[1:]])
    program, x, ranks = _enter("all_gather", x, mesh_axis)
    _check_rows("all_gather", x)
    if len(ranks) == 1:
        return tf.identity(x)
    # Eagerly every length is known, and may be this rank's only.
    if uneven or x.shape[0] is None or program.is_eager:
        return all_gather_uneven(program, x, ranks, label)

    return with_adjoint(
        lambda x: group_ops.all_gather(program, x, ranks, label),
        lambda upstream: reduce_scatter(upstream, mesh_axis, label=f"{label}/gradient"),
        x,
    )


def all_gather_uneven(program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
    """All-gather of tensors whose axis 0 differs by rank: padded to the power of two that holds the longest.

    At least one row, because kernels crash on none; a power of two, because every length that occurs costs a key.
    """
    length = tf.shape(x)[0]
    lengths = group_ops.all_gather(program, tf.reshape(length, [1]), ranks, f"{label}/lengths")
    rows = power_of_two(tf.reduce_max(lengths))
    inner = x.shape[1:]
    keep = tf.reshape(tf.sequence_mask(lengths, rows), [-1])
    # The padding and the mask are ordinary differentiable ops; only the trip in the middle needs an adjoint.
    padded = with_zeros(x, rows - length)

    def gather(part: tf.Tensor) -> tf.Tensor:
        return group_ops.all_gather(program, tf.ensure_shape(part, [None, *inner]), ranks, label)

    def scatter(whole: tf.Tensor) -> tf.Tensor:
        pieces = tf.ensure_shape(tf.reshape(whole, [len(ranks), rows, *inner]), [len(ranks), None, *inner])
        return group_ops.reduce_scatter(program, pieces, ranks, f"{label}/gradient")

    def gathered(part: tf.Tensor) -> tf.Tensor:
        return with_adjoint(gather, scattered, watched(program, part, ranks))

    def scattered(upstream: tf.Tensor) -> tf.Tensor:
        return with_adjoint(scatter, gathered, watched(program, upstream, ranks))

    return noted(program, tf.boolean_mask(gathered(padded), keep), ranks, x)


def reduce_scatter(x: tf.Tensor, mesh_axis: str = "data", *, label: str = "reduce_scatter") -> tf.Tensor:
    """Sums `x` over the group and returns this rank's rows of the sum: the inverse traffic of `all_gather`.

    With n = `x.shape[0]` rows, N ranks and c = ceil(n / N), rank i of the group gets rows [i c, min((i + 1) c, n)); the last
    ranks may get fewer rows, or none.

    Args:
        x: tensor of rank at least 1 and static shape, the same on all ranks.
        mesh_axis: "data", "pipe" or "tensor".
        label: what it is for, shown in the plan.

    Returns:
        A tensor of shape `(this rank's number of rows, *x.shape[1:])`.

    Raises:
        ValueError: `x` is a scalar, its shape is not static, or a dtype that collectives do not carry.
        RuntimeError: called outside `strategy.run`, or ranks disagree on the shape.
    """
    program, x, ranks = _enter("reduce_scatter", x, mesh_axis)
    _check_rows("reduce_scatter", x, static_rows=True)
    size, rows = len(ranks), x.shape[0]
    chunk = -(-rows // size)
    index = ranks.index(program.rank)
    mine = max(0, min((index + 1) * chunk, rows) - index * chunk)

    def scatter(x: tf.Tensor) -> tf.Tensor:
        stacked = tf.reshape(with_zeros(x, chunk * size - rows), [size, chunk, *x.shape[1:]])
        return group_ops.reduce_scatter(program, stacked, ranks, label)[:mine]

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        return all_gather(with_zeros(upstream, chunk - mine), mesh_axis, label=f"{label}/gradient")[:rows]

    return with_adjoint(scatter, gradient, x)


def all_to_all(x: tf.Tensor, mesh_axis: str = "data", *, label: str = "all_to_all") -> tf.Tensor:
    """Sends the i-th block of rows of `x` to the i-th rank and returns the blocks received, in group order.

    Args:
        x: tensor whose axis 0 is a multiple of the group's size N, the same shape on all ranks.
        mesh_axis: "data", "pipe" or "tensor".
        label: what it is for, shown in the plan.

    Returns:
        A tensor like `x`.

    Raises:
        ValueError: N does not divide `x.shape[0]`, or a dtype that collectives do not carry.
        RuntimeError: called outside `strategy.run`, or ranks disagree on the shape.
    """
    program, x, ranks = _enter("all_to_all", x, mesh_axis)
    _check_rows("all_to_all", x, static_rows=True)
    if x.shape[0] % len(ranks):
        raise errors.value_error(
            f"`all_to_all` needs axis 0 to be a multiple of the group's size, {len(ranks)}.",
            shape=tuple(x.shape),
            fix="Pad axis 0.",
        )

    def exchange(x: tf.Tensor) -> tf.Tensor:
        blocks = tf.reshape(x, [len(ranks), x.shape[0] // len(ranks), *x.shape[1:]])
        return tf.reshape(group_ops.all_to_all(program, blocks, ranks, label), x.shape)

    return with_adjoint(exchange, lambda upstream: all_to_all(upstream, mesh_axis, label=f"{label}/gradient"), x)


def broadcast(x: tf.Tensor, mesh_axis: str = "data", *, root: int = 0, label: str = "broadcast") -> tf.Tensor:
    """Gives every rank of the group the `x` of the group's member `root`.

    Args:
        x: tensor of one static shape on all ranks; only the root's values matter.
        mesh_axis: "data", "pipe" or "tensor".
        root: index within the group, in [0, N).
        label: what it is for, shown in the plan.

    Returns:
        A tensor like `x`.

    Raises:
        ValueError: `root` outside the group, a shape that is not static, or a dtype that collectives do not carry.
        RuntimeError: called outside `strategy.run`, or ranks disagree on the shape.
    """
    program, x, ranks = _enter("broadcast", x, mesh_axis)
    if not 0 <= root < len(ranks):
        raise errors.value_error(f"`root` must be an index in the group, [0, {len(ranks)}).", root=root)
    group_ops.check_static("broadcast", x)

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        total = all_reduce(upstream, mesh_axis, label=f"{label}/gradient")
        return total if program.rank == ranks[root] else tf.zeros_like(total)

    return with_adjoint(lambda x: group_ops.broadcast(program, x, x.shape, ranks, ranks[root], label), gradient, x)


def _enter(op: str, x: tf.Tensor, mesh_axis: str) -> tuple[RankProgram, tf.Tensor, tuple[int, ...]]:
    program = current_program(f"`{op}`")
    x = tf.convert_to_tensor(x)
    # What goes back to a sum of gradients, linear in it or not, is of the sum.
    x = x if program.root.is_going_back else program.summand(x)
    group_ops.check_dtype(op, x)
    ranks = program.group_ranks(mesh_axis)
    return program, watched(program, x, ranks), ranks


def watched(program: RankProgram, x: tf.Tensor, ranks: Ranks) -> tf.Tensor:
    """Returns `x`, which is about to be sent, and notes it if a tape watches it: on the way back of another tape, too."""
    if x.dtype.is_floating and (program.outer is not None or tape.tapes_watching([x])):  # none looks into a branch
        program.watched_groups.add(ranks)
    return x


def _check_rows(op: str, x: tf.Tensor, static_rows: bool = False) -> None:
    if x.shape.rank is None or x.shape.rank == 0:
        raise errors.value_error(f"`{op}` cuts or joins axis 0 and needs a tensor of rank at least 1.", shape=x.shape)
    static = x.shape if static_rows else x.shape[1:]
    if not static.is_fully_defined():
        raise errors.value_error(
            f"`{op}` needs static dimensions{'' if static_rows else ' after axis 0'}.",
            shape=x.shape,
            fix="Use `tf.ensure_shape`, or batch with `drop_remainder=True`.",
        )
