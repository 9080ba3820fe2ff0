"""Whether weights of which several ranks hold copies are still the same on all of them: for debugging (`check_drift_every`).

They are updated by each rank from a gradient that must be the same on each. A custom layer that forgets a region's border
breaks that on tensor ranks without any error, and the ranks' models drift. Sharding groups have copies, too, of which each
rank updates its part: they differ where machines compute differently.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, group_ops
from tfdist.optimizers.target import local_part, variable_of
from tfdist.sharding import MeshConfig
from tfdist.sharding.fingerprints import fingerprint

_BORDERS = (
    "A layer enters or leaves a cut region without a border of `tfdist.layers.regions`, or draws random numbers of its own on "
    "each rank."
)
_MACHINES = "Their machines compute an update differently (other processors or libraries), or it is not deterministic."


def check_drift(optimizer: Any, variables: Sequence[Any], config: MeshConfig, program: RankProgram) -> None:
    """Compares, in every `config.check_drift_every`-th step, a fingerprint of each weight over the ranks that hold copies of it.

    Two messages of one number a weight, over the tensor group and over what the sharding groups have alike. Where they differ the
    step raises `tf.errors.InvalidArgumentError`, which names them.
    """
    whole = [v for v in variables if not variable_of(v).layout.is_tensor_sharded]

    def compare() -> None:
        if whole:
            _compare("tensor", whole, "tensor ranks", _BORDERS, program)
        if variables:
            _compare("replicate", variables, "ranks of several sharding groups", _MACHINES, program)

    is_due = tf.equal((tf.convert_to_tensor(optimizer.iterations) + 1) % config.check_drift_every, 0)
    program.cond(is_due, compare)


def _compare(mesh_axis: str, variables: Sequence[Any], holders: str, cause: str, program: RankProgram) -> None:
    ranks = program.group_ranks(mesh_axis)
    if len(ranks) == 1:
        return
    names = [getattr(variable, "path", None) or variable.name for variable in variables]
    prints = tf.stack([fingerprint(tf.convert_to_tensor(local_part(v, program))) for v in variables])
    label = "drift" if mesh_axis == "tensor" else "drift/groups"
    highest = group_ops.all_reduce(program, prints, ranks, "max", f"{label}/max")
    differs = tf.not_equal(highest, group_ops.all_reduce(program, prints, ranks, "min", f"{label}/min"))
    tf.debugging.Assert(
        tf.logical_not(tf.reduce_any(differs)),
        [
            f"Weights that the {holders} {list(ranks)} hold alike have drifted apart:",
            tf.boolean_mask(tf.constant(names), differs),
            cause,
        ],
        summarize=20,
    )
