"""Trains one model under several strategies on null GPUs, with marks in their log. See `benchmarks.gpu_timeline`.

python -m benchmarks.gpu_timeline_child CASES PENDING    (JSON: {name: {"layers": 12, "width": 512, "steps": 3, ...}})

In one process, or in each of a job's. Steps that warm up take no time of the devices.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import context

import tfdist
from tests.null_gpu import device
from tests.null_gpu.cases import make_strategy
from tests.null_gpu.running import report

HOST_THREADS = 16  # as on a machine with GPUs: here they start kernels and wait


def build_step(case: dict[str, Any]) -> Any:
    """Returns a function that runs one training step of dense layers, in pairs where they are tensor-parallel, by Adam."""
    settings, width = case["settings"], case["width"]
    strategy = (
        mirrored_strategy() if settings is None else make_strategy(**settings)
    )  # first: workers meet before TensorFlow starts
    settings = settings or {}
    with strategy.scope():
        if "tensor_parallel_size" in settings:
            column, row = tfdist.layers.ColumnParallelDense, tfdist.layers.RowParallelDense
            layers = [
                column(width, use_bias=False, gather_output=False)
                if place % 2 == 0
                else row(width, use_bias=False, input_is_parallel=True)
                for place in range(case["layers"])
            ]
        else:
            layers = [keras.layers.Dense(width, use_bias=False) for _ in range(case["layers"])]
        model = keras.Sequential([keras.Input((width,)), *layers])
        if "pipeline_parallel_size" in settings:
            model = tfdist.PipelineModel(model, num_microbatches=case["microbatches"])
        model.compile(keras.optimizers.Adam(), loss="mse", auto_scale_loss=False, jit_compile=False)
        model.optimizer.build(model.trainable_variables)
    x = strategy.experimental_distribute_values_from_function(lambda _: tf.zeros([case["rows"], width]))

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> None:
        strategy.run(lambda x: model.train_step((x, x)), (x,))

    return lambda: step(x)


def mirrored_strategy() -> tf.distribute.Strategy:
    """Returns TensorFlow's own, over the workers of a job or over this process's GPUs."""
    if "TF_CONFIG" in os.environ:
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.NCCL
        )
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    return tf.distribute.MirroredStrategy([gpu.name for gpu in tf.config.list_logical_devices("GPU")])


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
                device.set_pace(int(number >= 0))
                device.note(f"{name} {number} begins")
                step()
                device.wait_for_all()
                device.note(f"{name} {number} ends")
        except Exception:
            report(name, {"error": traceback.format_exc()})
        else:
            report(name, {})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
