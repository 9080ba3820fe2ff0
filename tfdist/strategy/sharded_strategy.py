"""`tfdist.ShardedStrategy`: the devices of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import CollectivePlan
from tfdist.mesh import DeviceMesh, resolve_devices
from tfdist.sharding import DEFAULT_BUCKET_BYTES, ShardingConfig
from tfdist.strategy.extended import ShardedMirroredExtended


class ShardedStrategy(tf.distribute.MirroredStrategy):
    """Trains a Keras model on several devices of this machine without keeping a copy of everything on each.

    `MirroredStrategy` keeps parameters, gradients and optimizer state whole on every device. This keeps a part of them, by
    `zero_stage`; nothing else of the program changes. Per device, for N devices and float32 Adam, in bytes per parameter:

        zero_stage   parameters   gradients   optimizer state   together     elements moved a step
        0            4            4           8                 16           2 per parameter
        1            4            4           8/N               8 + 8/N      2
        2 (default)  4            4/N         8/N               4 + 12/N     2
        3            4/N          4/N         8/N               16/N         3, and layers are gathered when used

    Life of a step: each rank computes on its part of the global batch; gradients are summed and cut; each rank steps the
    optimizer on its part; the updated parts are shared (stages 1, 2) or stay where they are (stage 3).

        strategy = tfdist.ShardedStrategy(zero_stage=3)
        with strategy.scope():
            model = build_model()
            model.compile(optimizer=keras.optimizers.AdamW(3e-4), loss="sparse_categorical_crossentropy")
        model.fit(dataset)

    The mistake to avoid: building or compiling outside `scope()`. It raises.

    Args:
        devices: device names, one rank each, such as `["GPU:0", "GPU:1"]`. None: all GPUs, or all logical CPUs where there is
            no GPU (`tfdist.use_logical_cpus(n)` makes n of them).
        zero_stage: 0, 1, 2 or 3.
        bucket_bytes: stages 0-2: gradients travel in messages of about this many bytes.
        prefetch: stage 3: how many layers may be gathered ahead of the one in use. Each costs a gathered layer of memory.
        reshard_after_forward: stage 3: True frees a gathered layer after forward and gathers it again for backward; False keeps
            it: a third less traffic, and all parameters gathered at the end of forward.
        reduce_dtype: dtype in which gradients travel, such as "bfloat16"; None: the parameter's dtype. Over NCCL a bfloat16
            reduction is widened to float32 for the trip, which TensorFlow's kernels need.
        tensor_parallel_size: ranks that share each layer. Only 1 so far.
        pipeline_parallel_size: ranks in a pipeline. Only 1 so far.

    Raises:
        ValueError: an argument is out of range, devices are unknown, doubled, mixed or none, or the sizes do not divide the
            number of devices.
        NotImplementedError: a tensor or pipeline size above 1.

    Source: ZeRO, Rajbhandari et al. 2020; the life of a parameter in stage 3 is that of PyTorch's FSDP, Zhao et al. 2023.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        zero_stage: int = 2,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        prefetch: int = 1,
        reshard_after_forward: bool = True,
        reduce_dtype: Any = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
    ):
        mesh = DeviceMesh(
            resolve_devices(devices),
            pipeline_parallel_size=pipeline_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
        )
        if tensor_parallel_size > 1 or pipeline_parallel_size > 1:
            raise NotImplementedError(
                errors.message(
                    "`tensor_parallel_size` and `pipeline_parallel_size` above 1 are not built yet.",
                    tensor_parallel_size=tensor_parallel_size,
                    pipeline_parallel_size=pipeline_parallel_size,
                    fix="Leave both at 1: all devices then share the data axis.",
                )
            )
        self._sharding_config = ShardingConfig(
            mesh=mesh,
            zero_stage=zero_stage,
            bucket_bytes=bucket_bytes,
            prefetch=prefetch,
            reshard_after_forward=reshard_after_forward,
            reduce_dtype=reduce_dtype,
        )
        # Not MirroredStrategy.__init__, which makes its own extended; the base class stays, for isinstance checks.
        tf.distribute.Strategy.__init__(self, ShardedMirroredExtended(self, self._sharding_config))

    @property
    def sharding_config(self) -> ShardingConfig:
        """The strategy's settings."""
        return self._sharding_config

    @property
    def mesh(self) -> DeviceMesh:
        """The devices as a mesh (data, pipe, tensor)."""
        return self._sharding_config.mesh

    @property
    def zero_stage(self) -> int:
        return self._sharding_config.zero_stage

    @property
    def last_plan(self) -> CollectivePlan | None:
        """The collectives of the step that was traced last, per rank; None before the first."""
        return self.extended.last_plan
