"""Steps of wide layers on null GPUs, of one process or of a job's, for what is seen only where products and messages take time.

python -m tests.null_gpu.lead_program CASES    (JSON: {name: {"zero_stage": 3, "predicts": true, ...}}, settings of the strategy)

Of each case it reports, for every device, the bytes that TensorFlow's allocator has given out: for what the model and the
optimizer keep ("states"), between steps ("rest") and at the most in one ("peak").
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from typing import Any

import keras
import tensorflow as tf

from tests.null_gpu import device
from tests.null_gpu.cases import make_strategy
from tests.null_gpu.running import report

WIDTH, LAYERS, ROWS = 512, 6, 8
LAYER_BYTES = 4 * WIDTH**2
STEPS = 4  # the first traces
HOST_THREADS = 16  # as on a machine with GPUs: here they start kernels and wait


def main(cases: dict[str, dict[str, Any]]) -> None:
    tf.config.threading.set_inter_op_parallelism_threads(HOST_THREADS)
    for name, settings in cases.items():
        try:
            report(name, _run(name, settings))
        except Exception:  # the others are worth running, and the test says which have failed
            report(name, {"error": traceback.format_exc()})


def _run(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    predicts = settings.pop("predicts", False)
    strategy = make_strategy(**settings)  # first: workers must meet before TensorFlow starts
    gpus = [f"GPU:{index}" for index in range(len(tf.config.list_physical_devices("GPU")))]
    keras.backend.clear_session()
    gc.collect()  # what the case before has kept
    before = [_memory(gpu)["current"] for gpu in gpus]
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile(keras.optimizers.Adam(), loss="mse", auto_scale_loss=False)
        if not predicts:
            model.optimizer.build(model.trainable_variables)
    states = [_memory(gpu)["current"] - kept for gpu, kept in zip(gpus, before, strict=True)]
    x = strategy.experimental_distribute_values_from_function(lambda _: tf.zeros([ROWS, WIDTH]))
    rank_step = (lambda x: tf.reduce_sum(model(x))) if predicts else (lambda x: model.train_step((x, x)))

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        return strategy.run(rank_step, (x,))

    for number in range(STEPS):
        device.wait_for_all()
        rest = [_memory(gpu)["current"] for gpu in gpus]
        for gpu in gpus:
            tf.config.experimental.reset_memory_stats(gpu)
        device.note(f"{name} {number} begins")
        step(x)
        device.wait_for_all()
        device.note(f"{name} {number} ends")
    return {"states": states, "rest": rest, "peak": [_memory(gpu)["peak"] for gpu in gpus]}


def _memory(gpu: str) -> dict[str, int]:
    return tf.config.experimental.get_memory_info(gpu)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
