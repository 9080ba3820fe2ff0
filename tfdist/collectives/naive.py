"""The all-reduce that needs no idea: everybody sends to one master, which adds up and sends back.

Kept because it explains the ring (docs/concepts.md). With S bytes and N ranks the master's link carries 2 (N-1) S bytes, growing
with N, while the others' idle. The ring splits S in N pieces and keeps every link busy: each rank sends 2 S (N-1)/N bytes, less
than 2 S for every N.
"""

import tensorflow as tf

from tfdist.collectives import ops, point_to_point
from tfdist.collectives.where import current_program


def gather_to_master_all_reduce(x: tf.Tensor, mesh_axis: str = "data") -> tf.Tensor:
    """Sums `x` over the group through its first member. For tests and for teaching; use `all_reduce`.

    Args:
        x: tensor of one static shape on all ranks.
        mesh_axis: "data", "pipe" or "tensor".

    Returns:
        A tensor like `x`: the sum over the group, added in rank order.
    """
    program = current_program("`gather_to_master_all_reduce`")
    ranks = program.group_ranks(mesh_axis)
    x = tf.convert_to_tensor(x)
    total = x
    if program.rank == ranks[0]:
        for index in range(1, len(ranks)):
            total += point_to_point.receive(x.shape, x.dtype, index, mesh_axis, label=f"naive/from_{index}")
    else:
        point_to_point.send(x, 0, mesh_axis, label=f"naive/from_{ranks.index(program.rank)}")
    return ops.broadcast(total, mesh_axis, label="naive/broadcast")


def naive_master_bytes(tensor_bytes: int, world_size: int) -> int:
    """Bytes over the busiest link (the master's, both ways) of the naive all-reduce: 2 (N - 1) S."""
    return 2 * (world_size - 1) * tensor_bytes


def ring_bytes(tensor_bytes: int, world_size: int) -> float:
    """Bytes that each rank sends in a ring all-reduce: 2 S (N - 1) / N."""
    return 2 * tensor_bytes * (world_size - 1) / world_size
