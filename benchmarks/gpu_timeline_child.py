"""Trains one model under several strategies on null GPUs, with marks in their log. See `benchmarks.gpu_timeline`.

python -m benchmarks.gpu_timeline_child CASES PENDING    (JSON: {name: {"layers": 12, "width": 512, "steps": 3, ...}})
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import context

import tfdist
from tests.null_gpu import device
from tests.null_gpu.running import report

HOST_THREADS = 16  # as on a machine with GPUs: here they start kernels and wait
ROWS = 8  # of a device's batch; how long a product takes does not depend on it


def build_step(case: dict[str, Any]) -> Any:
    """Returns a function that runs one training step: dense layers of one width, Adam."""
    devices = [gpu.name for gpu in tf.config.list_logical_devices("GPU")]
    settings = case["settings"]
    strategy = tf.distribute.MirroredStrategy(devices) if settings is None else tfdist.ShardedStrategy(devices, **settings)
    with strategy.scope():
        layers = [keras.layers.Dense(case["width"], use_bias=False) for _ in range(case["layers"])]
        model = keras.Sequential([keras.Input((case["width"],)), *layers])
        model.compile(keras.optimizers.Adam(), loss="mse", auto_scale_loss=False, jit_compile=False)
        model.optimizer.build(model.trainable_variables)
    x = strategy.experimental_distribute_values_from_function(lambda _: tf.zeros([ROWS, case["width"]]))

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> None:
        strategy.run(lambda x: model.train_step((x, x)), (x,))

    return lambda: step(x)


def start_tensorflow(pending_kernels: int) -> None:
    """Starts TensorFlow; with `pending_kernels` above 0 the host waits while more kernels than that are queued on a device."""
    if pending_kernels:
        config = tf.compat.v1.ConfigProto()
        config.gpu_options.experimental.kernel_tracker_max_interval = 1
        config.gpu_options.experimental.kernel_tracker_max_pending = pending_kernels
        context.context()._config = config  # TensorFlow 2 has no public way
    tf.config.threading.set_inter_op_parallelism_threads(HOST_THREADS)


def main(cases: dict[str, dict[str, Any]], pending_kernels: int) -> None:
    start_tensorflow(pending_kernels)
    for name, case in cases.items():
        try:
            step = build_step(case)
            for number in range(-2, case["steps"]):  # two warm up
                device.note(f"{name} {number} begins")
                step()
                tf.test.experimental.sync_devices()
                device.note(f"{name} {number} ends")
        except Exception:
            report(name, {"error": traceback.format_exc()})
        else:
            report(name, {})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
