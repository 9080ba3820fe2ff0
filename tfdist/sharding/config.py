"""What a strategy tells the levels below about sharding."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdist import errors
from tfdist.mesh import DeviceMesh
from tfdist.sharding.layout import Layout
from tfdist.sharding.placements import Replicate, Shard
from tfdist.sharding.zero import ZeroPlacements, placements_of

DEFAULT_BUCKET_BYTES = 8 * 2**20
DEFAULT_GROUP_BYTES = 2 * 2**20


@dataclasses.dataclass(frozen=True)
class ShardingConfig:
    """The settings of one strategy, checked.

    Attributes:
        mesh: the devices.
        zero_stage: 0 to 3.
        bucket_bytes: aimed-at size of a message in the reduction of gradients, in bytes (stages 0-2).
        group_bytes: aimed-at size of a parameter group, what is gathered in one message, in bytes (stage 3); 0: one layer.
        prefetch: parameter groups that may be gathered ahead of the one in use (stage 3).
        reshard_after_forward: whether stage 3 frees gathered parameters after forward and gathers them again for backward.
        reduce_dtype: dtype in which gradients travel; None: their own, and sums of half precision are made in float32.
        check_drift_every: in every so many-th step weights that tensor ranks hold alike are compared; 0: never.
    """

    mesh: DeviceMesh
    zero_stage: int = 2
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    group_bytes: int = DEFAULT_GROUP_BYTES
    prefetch: int = 1
    reshard_after_forward: bool = True
    reduce_dtype: tf.DType | None = None
    check_drift_every: int = 0

    def __post_init__(self) -> None:
        placements_of(self.zero_stage)
        for name, least in (("bucket_bytes", 1), ("group_bytes", 0), ("prefetch", 0), ("check_drift_every", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(errors.message(f"`{name}` must be an integer of at least {least}.", **{name: value}))
        if not isinstance(self.reshard_after_forward, bool):
            raise ValueError(
                errors.message("`reshard_after_forward` must be True or False.", reshard_after_forward=self.reshard_after_forward)
            )
        if self.reduce_dtype is not None:
            try:
                dtype = tf.as_dtype(self.reduce_dtype)
            except TypeError:
                dtype = None
            if dtype not in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
                raise ValueError(
                    errors.message(
                        "`reduce_dtype` must be a floating dtype or None (the variable's own).",
                        reduce_dtype=self.reduce_dtype,
                    )
                )
            object.__setattr__(self, "reduce_dtype", dtype)

    @property
    def placements(self) -> ZeroPlacements:
        return placements_of(self.zero_stage)

    def travel_dtype(self, dtype: tf.DType) -> tf.DType:
        """Returns the dtype in which gradients of `dtype` are sent."""
        return self.reduce_dtype or dtype

    def parameter_layout(self, shape: tuple[int, ...], tensor: Replicate | Shard | None = None) -> Layout:
        """Returns the layout of a trainable variable of global `shape`, cut over the tensor axis as `tensor` says (None: not)."""
        return Layout(tuple(shape), self.mesh, tensor=tensor or Replicate(), data=self.placements.parameter)

    def slot_layout(self, parameter: Layout) -> Layout:
        """Returns the layout of an optimizer slot of `parameter`: cut as it, and flat over data where the stage says so."""
        return dataclasses.replace(parameter, data=self.placements.optimizer_state)


def config_of(strategy: tf.distribute.Strategy) -> ShardingConfig | None:
    """Returns the sharding configuration of a tfdist strategy, None for every other strategy."""
    return getattr(strategy, "sharding_config", None)
