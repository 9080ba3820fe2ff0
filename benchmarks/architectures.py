"""Trains real architectures under every kind of sharding and on one device, and compares losses and weights.

    python benchmarks/architectures.py
    python benchmarks/architectures.py MobileNetV3Small text --devices 4 --float64

Two comparisons per architecture and stage, each printing the largest relative difference of a loss, and of a weight relative to
the largest of its variable:

    from one device    what must be the same on any number of devices: BatchNormalization is frozen, on statistics of the training
                       images, so that activations neither vanish nor explode, and dropout is off
    from stage 0       as it is: BatchNormalization and dropout train, with the ranks' own statistics and masks
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist

if not __package__:  # run as a file: its folder stands on the path instead of the repository
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from benchmarks import cases
from benchmarks.devices import take_devices

CLASSES, SAMPLES, BATCH, EPOCHS = 5, 16, 8, 3
STAGES = (0, 2, 3)
# Clipped, because their gradients are large where the statistics do not follow. The text's is not: Keras on one device takes the
# norm of an embedding's gradient before it has summed the rows of equal tokens, which is not the norm of the gradient.
SGD = {
    "MobileNetV3Small": {"learning_rate": 1e-3, "global_clipnorm": 1.0},
    "EfficientNetB0": {"learning_rate": 1e-4, "global_clipnorm": 1.0},
    "text": {"learning_rate": 1e-2},
}


def image_model(name: str) -> keras.Model:
    application = getattr(keras.applications, name)
    return application(weights=None, classes=CLASSES, classifier_activation=None, input_shape=(64, 64, 3))


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
    return rng.uniform(0, 255, (SAMPLES, 64, 64, 3)).astype(keras.config.floatx()), labels


def calibrated_weights(name: str) -> list[np.ndarray]:
    """Returns initial weights, with the statistics of the training images where there are any."""
    keras.utils.set_random_seed(3)
    model = ARCHITECTURES[name]()
    for layer in model._flatten_layers():
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = 0.0
        elif isinstance(layer, layers.Dropout):
            layer.rate = 0.0
    model(data_of(name)[0], training=True)
    return model.get_weights()


def train(
    strategy: tf.distribute.Strategy, name: str, weights: list[np.ndarray], frozen: bool
) -> tuple[list[float], list[np.ndarray]]:
    """Returns the losses of all steps and the weights after them; `frozen` is about BatchNormalization and dropout."""
    x, y = data_of(name)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = ARCHITECTURES[name]()
        for layer in model._flatten_layers() if frozen else ():
            if isinstance(layer, layers.BatchNormalization):
                layer.trainable = False
            elif isinstance(layer, layers.Dropout):
                layer.rate = 0.0
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(**SGD[name], momentum=0.9), loss)
    model.set_weights(weights)
    losses: list[float] = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[record])
    if not np.isfinite(losses).all():
        raise FloatingPointError(f"{name} diverges, so nothing can be compared: losses {losses}")
    return losses, model.get_weights()


def difference(ours: Any, theirs: Any) -> float:
    return float(np.abs(np.asarray(ours) - theirs).max(initial=0.0) / max(np.abs(theirs).max(initial=0.0), 1e-2))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="name", help=f"of {', '.join(ARCHITECTURES)} (default: all)")
    parser.add_argument("--devices", type=int, default=2, help="ranks (default: 2)")
    cases.add_logical_gpus(parser)
    parser.add_argument("--float64", action="store_true", help="compute in float64: what is left is no rounding of float32")
    args = parser.parse_args()
    if unknown := set(args.architectures) - set(ARCHITECTURES):
        parser.error(f"unknown architectures {sorted(unknown)}, there are {sorted(ARCHITECTURES)}")
    return args


def compare(devices: list[str], name: str) -> None:
    weights = calibrated_weights(name)
    losses, _ = one_device = train(tf.distribute.get_strategy(), name, weights, frozen=True)
    print(f"{name}: {sum(weight.size for weight in weights):,} weights, losses {losses[0]:.4f} to {losses[-1]:.4f}")
    stage_0 = None
    for zero_stage in STAGES:
        strategy = tfdist.ShardedStrategy(devices, zero_stage=zero_stage)
        report(name, strategy, "one device", train(strategy, name, weights, frozen=True), one_device)
        as_it_is = train(strategy, name, weights, frozen=False)
        stage_0 = stage_0 or as_it_is
        report(name, strategy, "stage 0", as_it_is, stage_0)


def report(name: str, strategy: tfdist.ShardedStrategy, reference: str, ours: Any, theirs: Any) -> None:
    of_losses = difference(ours[0], theirs[0])
    of_weights = max(difference(*pair) for pair in zip(ours[1], theirs[1], strict=True))
    print(f"  zero_stage {strategy.zero_stage}, from {reference}: losses {of_losses:.1e}, weights {of_weights:.1e}")
    case = {"benchmark": "architectures", "case": name, "zero_stage": strategy.zero_stage}
    case |= {"devices": strategy.num_replicas_in_sync, "reference": reference, "floatx": keras.config.floatx()}
    figures = {"losses": ours[0], "losses_difference": of_losses, "weights_difference": of_weights}
    print(json.dumps({**case, **figures}), flush=True)


def main() -> None:
    args = parse_args()
    devices = take_devices(args.devices, args.logical_gpus)
    if args.float64:
        keras.config.set_floatx("float64")
    for name in args.architectures or ARCHITECTURES:
        compare(devices, name)


if __name__ == "__main__":
    main()
