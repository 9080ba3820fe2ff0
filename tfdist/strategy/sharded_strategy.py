"""`tfdist.ShardedStrategy`: the devices of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.mesh import resolve_devices
from tfdist.sharding import DEFAULT_BUCKET_BYTES, DEFAULT_GROUP_BYTES
from tfdist.strategy.extended import ShardedMirroredExtended
from tfdist.strategy.sharded_mixin import ShardedStrategyMixin, sharding_config


class ShardedStrategy(ShardedStrategyMixin, tf.distribute.MirroredStrategy):
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
        group_bytes: stage 3: what is gathered, and freed, at once: a layer, or consecutive layers up to this many bytes, because
            small messages cost what large ones do; 0: each layer alone.
        prefetch: stage 3: how many groups may be gathered ahead of the one in use. Each costs a gathered group of memory.
        reshard_after_forward: stage 3: True frees a gathered layer after forward and gathers it again for backward; False keeps
            it: a third less traffic, and all parameters gathered at the end of forward.
        reduce_dtype: dtype in which gradients travel, such as "bfloat16"; None: their own, and half-precision gradients are
            summed in float32. Over NCCL a bfloat16 reduction is widened to float32 for the trip, which TensorFlow's kernels need.
        tensor_parallel_size: ranks that share each layer that is cut: those of `tfdist.layers`, or of a model that
            `tfdist.parallelize` has cut. The batch is divided among `devices / tensor_parallel_size` replicas.
        pipeline_parallel_size: ranks that share the layers of a `tfdist.PipelineModel`, which the model to train must then be.
            `zero_stage` must be 0, 1 or 2.
        check_drift_every: for debugging layers of one's own: in every so many-th step the weights that all tensor ranks hold
            are compared, and the step raises when they differ; 0: never.

    Raises:
        ValueError: an argument is out of range, devices are unknown, doubled, mixed or none, or the sizes do not divide the
            number of devices.

    Source: ZeRO, Rajbhandari et al. 2020; the life of a parameter in stage 3 is that of PyTorch's FSDP, Zhao et al. 2023.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        zero_stage: int = 2,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        group_bytes: int = DEFAULT_GROUP_BYTES,
        prefetch: int = 1,
        reshard_after_forward: bool = True,
        reduce_dtype: Any = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        check_drift_every: int = 0,
    ):
        self._sharding_config = sharding_config(
            resolve_devices(devices),
            zero_stage=zero_stage,
            bucket_bytes=bucket_bytes,
            group_bytes=group_bytes,
            prefetch=prefetch,
            reshard_after_forward=reshard_after_forward,
            reduce_dtype=reduce_dtype,
            check_drift_every=check_drift_every,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
        )
        # Not MirroredStrategy.__init__, which makes its own extended; the base class stays, for isinstance checks.
        tf.distribute.Strategy.__init__(self, ShardedMirroredExtended(self, self._sharding_config))
