"""The borders of a tensor-parallel region: where the ranks of a tensor group begin and cease to compute different things.

A tensor is *whole* when every rank of the group holds the same, *sharded* when each holds its part along an axis, and *partial*
when each holds a summand. Each function takes one kind to another, and its gradient is the reverse; X is what a rank sends
forward, Y backward, for t ranks and an activation of S bytes:

    copy_to             whole -> whole      forward: identity          backward: all-reduce       Y = 2 S (t - 1) / t
    reduce_from         partial -> whole    forward: all-reduce        backward: identity         X = 2 S (t - 1) / t
    scatter_to          whole -> sharded    forward: own part          backward: all-gather       Y = S (t - 1) / t
    gather_from         sharded -> whole    forward: all-gather        backward: own part         X = S (t - 1) / t

and, for sequence parallelism (Korthikanti et al. 2022), where what lies between the sharded regions is sharded along the
sequence:

    gather_for_region   sharded -> whole    forward: all-gather        backward: reduce-scatter   X = Y = S (t - 1) / t
    reduce_scatter_from partial -> sharded  forward: reduce-scatter    backward: all-gather       X = Y = S (t - 1) / t

`gather_from` and `gather_for_region` differ in what follows: what every rank computes alike from the whole (its gradient is whole
on each), or each rank's part of a sharded region (its gradients are partial).

Outside `strategy.run` of a tfdist strategy with a tensor axis, and in Keras's symbolic build, all of them return their input.

Source: f and g of Megatron-LM, Shoeybi et al. 2019; the sequence-parallel pair of Korthikanti et al. 2022.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives import Part, RankProgram, activations, rank_program
from tfdist.custom_gradients import custom_gradient
from tfdist.graphs import tape
from tfdist.mesh import current_mesh


def tensor_program() -> RankProgram | None:
    """Returns the program of the rank that computes here, if it shares its layers with other ranks; else None.

    None outside replicas, in Keras's symbolic build, under other strategies and where the tensor axis has one rank.
    """
    return rank_program(peers_on="tensor")


def tensor_rank() -> int:
    """Returns the index of the rank that computes here on the tensor axis; 0 where nothing is sharded."""
    program = tensor_program()
    return 0 if program is None else program.mesh.coordinate(program.rank).tensor


def scope_tensor_size() -> int:
    """Returns the tensor size of the strategy whose scope this is; 1 without one."""
    mesh = current_mesh()
    return 1 if mesh is None else mesh.tensor_parallel_size


def copy_to(x: tf.Tensor, label: str = "copy_to") -> tf.Tensor:
    """Enters a sharded region with a whole tensor. Forward: identity; backward: all-reduce.

    A tensor that several layers take (query, key and value projections, the two of a gated MLP) enters once: its gradients are
    added up before the one all-reduce.
    """
    program = tensor_program()
    if program is None:
        return x
    x = tf.convert_to_tensor(x)
    entered = program.part(Entered).copies
    _, copy = entered.get(id(x), (None, None))
    is_here = copy is not None and (program.is_eager or copy.graph is tf.compat.v1.get_default_graph())
    if not is_here or tape.tapes_watching([copy]) < tape.tapes_watching([x]):  # all tapes that watch `x` must know it
        copy = _region(x, lambda _, x, **sent: tf.identity(x), activations.all_reduce, label)
        entered[id(x)] = (x, copy)  # x is kept, so that its id stays its own
    return copy


def reduce_from(x: tf.Tensor, label: str = "reduce_from") -> tf.Tensor:
    """Leaves a sharded region with each rank's summand. Forward: all-reduce; backward: identity."""
    return _region(x, activations.all_reduce, lambda _, upstream, **sent: upstream, label)


def scatter_to(x: tf.Tensor, axis: int = -1, label: str = "scatter_to") -> tf.Tensor:
    """Enters a sharded region with this rank's part of a whole tensor. Forward: own part; backward: all-gather.

    Raises:
        ValueError: the number of tensor ranks does not divide the size of `axis`.
    """
    return _region(x, _own_part, activations.all_gather, label, axis=axis)


def gather_from(x: tf.Tensor, axis: int = -1, label: str = "gather_from") -> tf.Tensor:
    """Leaves a sharded region with all ranks' parts, for what all compute alike. Forward: all-gather; backward: own part."""
    return _region(x, activations.all_gather, _own_part, label, axis=axis)


def gather_for_region(x: tf.Tensor, axis: int = 1, label: str = "gather_for_region") -> tf.Tensor:
    """Enters a sharded region from sequence-parallel activations. Forward: all-gather; backward: reduce-scatter."""
    return _region(x, activations.all_gather, activations.reduce_scatter, label, axis=axis)


def reduce_scatter_from(x: tf.Tensor, axis: int = 1, label: str = "reduce_scatter_from") -> tf.Tensor:
    """Leaves a sharded region for sequence-parallel activations. Forward: reduce-scatter; backward: all-gather.

    Raises:
        ValueError: the number of tensor ranks does not divide the size of `axis`.
    """
    return _region(x, activations.reduce_scatter, activations.all_gather, label, axis=axis)


def enter_region(x: tf.Tensor, sequence_parallel: bool, label: str) -> tf.Tensor:
    """Enters a sharded region from whole activations, or from those that are sharded along the sequence, axis 1."""
    return gather_for_region(x, 1, f"{label}/gather_sequence") if sequence_parallel else copy_to(x, f"{label}/copy_to")


def leave_region(x: tf.Tensor, bias: Any, sequence_parallel: bool, label: str) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Leaves a sharded region; returns the output and the bias to add to it, a whole weight or None.

    On activations that are sharded along the sequence each rank sees a part of the bias's gradient: it enters as into a region.
    """
    if not sequence_parallel:
        return reduce_from(x, f"{label}/reduce_from"), bias
    if bias is not None:
        bias = copy_to(tf.convert_to_tensor(bias), f"{label}/bias")
    return reduce_scatter_from(x, 1, f"{label}/reduce_scatter"), bias


def own_part(program: RankProgram, x: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns this rank's part of a whole tensor, without a gradient of its own."""
    parts = activations.split(x, program.mesh.tensor_parallel_size, axis)
    return parts[program.mesh.coordinate(program.rank).tensor]


class Entered(Part):
    """Which tensors of a rank have entered a sharded region in one trace.

    Attributes:
        copies: by the id of a tensor, which stays its own, that and its copy in the region.
    """

    def __init__(self, _: RankProgram):
        self.copies: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}


# What a border does with a tensor, given (program, tensor), and how that is `sent`: mesh_axis, label and, if there is one, axis.
_Side = Callable[..., tf.Tensor]


def _own_part(program: RankProgram, x: tf.Tensor, axis: int, **sent: str) -> tf.Tensor:
    return own_part(program, x, axis)


def _region(x: tf.Tensor, forward: _Side, backward: _Side, label: str, **axis: int) -> tf.Tensor:
    program = tensor_program()
    if program is None:
        return x

    @custom_gradient
    def border(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        with program.order.may_be_overtaken():
            y = forward(program, x, mesh_axis="tensor", label=label, **axis)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # Shapes are forgotten on the way back, and a collective wants to know what is static.
            with tape.backward_scope(), program.order.may_be_overtaken():
                upstream = tf.ensure_shape(upstream, y.shape)
                return backward(program, upstream, mesh_axis="tensor", label=f"{label}/gradient", **axis)

        return y, gradient

    return border(tf.convert_to_tensor(x))
