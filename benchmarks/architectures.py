"""Trains real architectures under every kind of sharding and on one device, and compares losses and weights.

    python benchmarks/architectures.py
    python benchmarks/architectures.py MobileNetV3Small text --devices 4

BatchNormalization is frozen on statistics of the training images, so that activations neither vanish nor explode; dropout is
off. Prints, per architecture and stage, the largest relative difference of a loss, and of a weight relative to the largest of its
variable, from one device.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist

CLASSES, SAMPLES, BATCH, EPOCHS = 5, 8, 4, 3
STAGES = (0, 2, 3)
LEARNING_RATE = {"MobileNetV3Small": 1e-4, "EfficientNetB0": 1e-6, "text": 1e-2}


def image_model(name: str) -> keras.Model:
    application = getattr(keras.applications, name)
    return application(weights=None, classes=CLASSES, classifier_activation=None, input_shape=(32, 32, 3))


def text_model() -> keras.Model:
    """An encoder: embedded tokens, two blocks of attention, a mean."""
    tokens = keras.Input((24,), dtype="int32")
    x = layers.Embedding(200, 48)(tokens)
    for _ in range(2):
        normed = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 12)(normed, normed)
        x = x + layers.Dense(48)(layers.Dense(96, activation="gelu")(layers.LayerNormalization()(x)))
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


ARCHITECTURES: dict[str, Callable[[], keras.Model]] = {
    "MobileNetV3Small": lambda: image_model("MobileNetV3Small"),
    "EfficientNetB0": lambda: image_model("EfficientNetB0"),
    "text": text_model,
}


def data_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, SAMPLES)
    if name == "text":
        return rng.integers(0, 200, (SAMPLES, 24)), labels
    return rng.uniform(0, 255, (SAMPLES, 32, 32, 3)).astype("float32"), labels


def calibrated_weights(name: str) -> list[np.ndarray]:
    """Returns initial weights, with the statistics of the training images where there are any."""
    keras.utils.set_random_seed(3)
    model = ARCHITECTURES[name]()
    for layer in normalizations(model):
        layer.momentum = 0.0
    model(data_of(name)[0], training=True)
    return model.get_weights()


def normalizations(model: keras.Model) -> list[layers.Layer]:
    return [layer for layer in model._flatten_layers() if isinstance(layer, layers.BatchNormalization)]


def train(strategy: tf.distribute.Strategy, name: str, weights: list[np.ndarray]) -> tuple[list[float], list[np.ndarray]]:
    """Returns the losses of all steps and the weights after them."""
    x, y = data_of(name)
    with strategy.scope():
        model = ARCHITECTURES[name]()
        for layer in normalizations(model):
            layer.trainable = False
        for layer in model._flatten_layers():
            if isinstance(layer, layers.Dropout):
                layer.rate = 0.0
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(LEARNING_RATE[name], momentum=0.9), loss)
    model.set_weights(weights)
    losses: list[float] = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[record])
    return losses, model.get_weights()


def difference(ours: Any, theirs: Any) -> float:
    return float(np.abs(np.asarray(ours) - theirs).max(initial=0.0) / max(np.abs(theirs).max(initial=0.0), 1e-2))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="name", help=f"of {', '.join(ARCHITECTURES)} (default: all)")
    parser.add_argument("--devices", type=int, default=2, help="logical CPUs (default: 2)")
    args = parser.parse_args()
    if unknown := set(args.architectures) - set(ARCHITECTURES):
        parser.error(f"unknown architectures {sorted(unknown)}, there are {sorted(ARCHITECTURES)}")
    return args


def main() -> None:
    args = parse_args()
    devices = tfdist.use_logical_cpus(args.devices)
    for name in args.architectures or ARCHITECTURES:
        weights = calibrated_weights(name)
        expected, expected_weights = train(tf.distribute.get_strategy(), name, weights)
        print(f"{name}: {sum(weight.size for weight in weights):,} weights, losses {expected[0]:.4f} to {expected[-1]:.4f}")
        for zero_stage in STAGES:
            start = time.perf_counter()
            losses, after = train(tfdist.ShardedStrategy(devices, zero_stage=zero_stage), name, weights)
            worst = max(difference(*pair) for pair in zip(after, expected_weights, strict=True))
            seconds = time.perf_counter() - start
            of_losses = difference(losses, expected)
            print(f"  zero_stage {zero_stage}: losses {of_losses:.1e}, weights {worst:.1e} ({seconds:.0f} s)")
            case = {"benchmark": "architectures", "case": name, "zero_stage": zero_stage, "devices": args.devices}
            print(json.dumps({**case, "losses_difference": of_losses, "weights_difference": worst}), flush=True)


if __name__ == "__main__":
    main()
