"""How exact the planned memory is: the plan beside TensorFlow's own count of the bytes of tensors.

    python benchmarks/planning_memory.py                        all models on one device
    python benchmarks/planning_memory.py mlp gpt --stages 0123  on two workers of one device each

Every case runs in a process (two) of its own: it trains some steps of `train_on_batch`, and the peak of each is what
`tf.config.experimental.get_memory_info("CPU:0")` says, over what there was before the model. That counter needs
TF_ENABLE_ONEDNN_OPTS=1, which is set here, and counts tensors of at least 256 kB. What it does not see, the plan does not count:
the process itself, its graphs, and the scratch of kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from tfdist.planning import Candidate
from tfdist.planning.memory import memory_of
from tfdist.planning.traced_model import trace

RUNS, WORKERS = 5, 2


class Block(layers.Layer):
    """A block of an encoder or, if causal, of a decoder."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, causal: bool = True, **settings):
        super().__init__(**settings)
        self.width, self.causal = width, causal
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.attention = layers.MultiHeadAttention(heads, width // heads, dropout=dropout)
        self.up, self.down = layers.Dense(4 * width, "gelu"), layers.Dense(width)
        self.dropout = layers.Dropout(dropout)

    def build(self, shape):
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * self.width))

    def call(self, x, training=None):
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=self.causal, training=training)
        return x + self.dropout(self.down(self.up(self.norms[1](x))), training=training)

    def compute_output_shape(self, shape):
        return shape


def compiled(model: keras.Model, loss: object = None) -> keras.Model:
    model.compile("adam", loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def mlp() -> keras.Model:
    return compiled(keras.Sequential([keras.Input((1024,)), *(layers.Dense(1024, "relu") for _ in range(8)), layers.Dense(10)]))


def transformer(blocks=4, width=128, length=256, dropout=0.0, causal=True, vocabulary=4096) -> keras.Model:
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(tokens)
    for index in range(blocks):
        x = Block(width, 4, dropout, causal, name=f"block_{index}")(x)
    return compiled(keras.Model(tokens, layers.Dense(vocabulary)(layers.LayerNormalization()(x))))


def vit() -> keras.Model:
    images = keras.Input((64, 64, 3))
    x = layers.Reshape((64, 128))(layers.Conv2D(128, 8, 8)(images))
    for index in range(4):
        x = Block(128, 4, causal=False, name=f"block_{index}")(x)
    return compiled(keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))))


def cnn() -> keras.Model:
    model = [keras.Input((64, 64, 3))]
    for filters in (32, 64, 128):
        model += [layers.Conv2D(filters, 3, padding="same", activation="relu") for _ in range(2)]
        model.append(layers.MaxPooling2D())
    return compiled(keras.Sequential([*model, layers.Flatten(), layers.Dense(10)]))


def unet() -> keras.Model:
    images = keras.Input((64, 64, 3))
    x, skips = images, []
    for filters in (16, 32, 64):
        x = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same", activation="relu")(x))
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(128, 3, padding="same", activation="relu")(x)
    for filters, skip in zip((64, 32, 16), reversed(skips), strict=True):
        x = layers.Concatenate()([layers.Conv2DTranspose(filters, 2, 2)(x), skip])
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return compiled(keras.Model(images, layers.Conv2D(5, 1)(x)))


def lstm() -> keras.Model:
    tokens = keras.Input((48,), dtype="int32")
    x = layers.LSTM(512, return_sequences=True)(layers.Embedding(2000, 512)(tokens))
    return compiled(keras.Model(tokens, layers.Dense(10)(layers.LSTM(512)(x))))


def two_outputs() -> keras.Model:
    inputs = keras.Input((256,))
    x = layers.Dense(512, "relu")(layers.Dense(512, "relu")(inputs))
    outputs = {"classes": layers.Dense(10, name="classes")(x), "value": layers.Dense(1, name="value")(x)}
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(keras.Model(inputs, outputs), {"classes": crossentropy, "value": "mse"})


def application(name: str) -> Callable[[], keras.Model]:
    made = getattr(keras.applications, name)
    return lambda: compiled(made(weights=None, classes=10, classifier_activation=None, input_shape=(96, 96, 3)))


# The model, and the examples of a device's batch.
MODELS: dict[str, tuple[Callable[[], keras.Model], int]] = {
    "mlp": (mlp, 2048),
    "gpt": (transformer, 8),
    "gpt_dropout": (lambda: transformer(dropout=0.1), 8),
    "bert": (lambda: transformer(causal=False), 8),
    "vit": (vit, 32),
    "cnn": (cnn, 64),
    "unet": (unet, 16),
    "lstm": (lstm, 256),
    "two_outputs": (two_outputs, 4096),
    "resnet50": (application("ResNet50"), 8),
    "mobilenet_v2": (application("MobileNetV2"), 8),
    "efficientnet_b0": (application("EfficientNetB0"), 8),
}


def batch_of(model: keras.Model, examples: int) -> tuple[np.ndarray, object]:
    rng = np.random.default_rng(0)
    (given,) = model.inputs
    shape = (examples, *given.shape[1:])
    x = rng.integers(0, 100, shape).astype("int32") if "int" in given.dtype else rng.normal(size=shape).astype("float32")
    outputs = model.outputs[0] if isinstance(model, keras.Sequential) else model.output

    def labels(output: keras.KerasTensor) -> np.ndarray:
        if output.shape[-1] == 1:
            return np.zeros((examples, 1), "float32")
        return rng.integers(0, 5, (examples, *output.shape[1:-1])).astype("int32")

    return x, keras.tree.map_structure(labels, outputs)


def peak_of(name: str, stage: int | None) -> dict[str, object]:
    """Returns the plan of a case, and what its steps took: run in a process of its own, or as one of `WORKERS`."""
    build, examples = MODELS[name]
    replicas = 1 if stage is None else WORKERS
    candidate = Candidate(zero_stage=stage or 0, data=replicas)
    # A worker makes its strategy first: tracing begins to use TensorFlow.
    strategy = tf.distribute.get_strategy() if stage is None else tfdist.MultiWorkerShardedStrategy(zero_stage=stage)
    planned = memory_of(trace(build), candidate, examples * replicas)
    info = tf.config.experimental.get_memory_info
    before = info("CPU:0")["current"]
    with strategy.scope():
        model = build()
    x, y = batch_of(model, examples * replicas)
    peaks = []
    for run in range(2 + RUNS):  # the first traces, the second is not like the others either
        tf.config.experimental.reset_memory_stats("CPU:0")
        model.train_on_batch(x, y)
        peaks += [info("CPU:0")["peak"] - before] if run >= 2 else []
    return {"planned": planned.together, "parts": planned.parts(), "peaks": sorted(peaks)}


def measured(name: str, stage: int | None) -> dict[str, object]:
    launch = [] if stage is None else ["-m", "tfdist", "run", "--workers", str(WORKERS), "--cpu"]
    root = pathlib.Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, *launch, __file__, name, "--child", "one" if stage is None else str(stage)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    found = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    if not found:
        raise RuntimeError(f"{name}, {stage}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    return json.loads(found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--stages", default="", help="stages on two workers, such as 0123; none: one device")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        stage = None if options.child == "one" else int(options.child)
        print("RESULT", json.dumps(peak_of(options.models[0], stage)), flush=True)
        return
    print("| model | examples | devices | planned MB | measured MB, median (least to most) | error |\n|---|---|---|---|---|---|")
    for name in options.models:
        for stage in [int(stage) for stage in options.stages] or [None]:
            found = measured(name, stage)
            peaks, planned = [peak / 1e6 for peak in found["peaks"]], found["planned"] / 1e6
            middle, where = statistics.median(peaks), "1" if stage is None else f"{WORKERS}, zero {stage}"
            spread = f"{middle:.1f} ({peaks[0]:.1f} to {peaks[-1]:.1f})"
            print(
                f"| {name} | {MODELS[name][1]} | {where} | {planned:.1f} | {spread} | {planned / middle - 1:+.1%} |", flush=True
            )


if __name__ == "__main__":
    main()
