"""`tfdist.ShardedStrategy`: the devices of one machine."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.mesh import resolve_devices
from tfdist.sharding import MeshConfig, ShardingConfig, settings_of
from tfdist.strategy.extended import ShardedMirroredExtended
from tfdist.strategy.sharded_mixin import ShardedStrategyMixin, takes_settings


@takes_settings
class ShardedStrategy(ShardedStrategyMixin, tf.distribute.MirroredStrategy):
    """Trains a Keras model on several devices of this machine without keeping a copy of everything on each.

    `MirroredStrategy` keeps parameters, gradients and optimizer state whole on every device. This keeps a part of them, by
    `zero_stage`; nothing else of the program changes. Per device, for N devices and float32 Adam, in bytes per parameter:

        zero_stage   parameters   gradients   optimizer state   together     elements moved a step
        0            4            4           8                 16           2 per parameter
        1            4            4           8/N               8 + 8/N      2
        2 (default)  4            4/N         8/N               4 + 12/N     2
        3            4/N          4/N         8/N               16/N         3, and layers are gathered when used

    Life of a step: each rank computes on its part of the global batch; gradients are summed and sharded. Each rank steps the
    optimizer on its part; the updated parts are shared (stages 1, 2) or stay where they are (stage 3).

        strategy = tfdist.ShardedStrategy(zero_stage=3)
        with strategy.scope():
            model = build_model()
            model.compile(optimizer=keras.optimizers.AdamW(3e-4), loss="sparse_categorical_crossentropy")
        model.fit(dataset)

    The mistake to avoid: building the model outside `scope()`. Compiling it raises.

    Args:
        devices: device names, one rank each, such as `["GPU:0", "GPU:1"]`. None: all GPUs, or all logical CPUs where there is
            no GPU (`tfdist.use_logical_cpus(n)` makes n of them).
        config: the settings as one object; None: their defaults. Settings given by name replace those of `config`.
        step_timeout_seconds: how long a step may wait without using a processor, once its data are there, before it is ended: for
            code of its own that does not return.
        ...: the settings

    Raises:
        ValueError: an argument is out of range, devices are unknown, doubled, mixed or none, or the sizes do not divide the
            number of devices.
        TypeError: an argument is not the name of a setting.

    Source: ZeRO, Rajbhandari et al. 2020; the life of a parameter in stage 3 is that of PyTorch's FSDP, Zhao et al. 2023.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        config: ShardingConfig | None = None,
        step_timeout_seconds: float = 600.0,
        **settings: Any,
    ):
        errors.check_seconds("step_timeout_seconds", step_timeout_seconds)
        self._sharding_config = MeshConfig.over(resolve_devices(devices), settings_of(config, settings))
        # Not MirroredStrategy.__init__, which makes its own extended; the base class stays, for isinstance checks.
        tf.distribute.Strategy.__init__(self, ShardedMirroredExtended(self, self._sharding_config))
        self.extended.step_timeout_seconds = step_timeout_seconds
