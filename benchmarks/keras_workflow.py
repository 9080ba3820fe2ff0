"""Times Keras's own way of working under a strategy beside one device and `MirroredStrategy`, in one process.

    python benchmarks/keras_workflow.py
    python benchmarks/keras_workflow.py --stages 0 3 --rounds 9

A small GPT (6 blocks, 384 wide, 13 M parameters by default). Per contender: a first `fit` of five steps with its trace, then, in
turns of all contenders so that the machine's moods fall on all alike, medians of

    eager        model(x) for one row of 32 tokens, outside any `tf.function`
    after_step   the same, straight after a step that has changed the weights
    predict      `predict` of one batch
    evaluate     `evaluate` of one batch
    fit          `fit` of five steps, traced before

It prints a JSON line per contender, and a table of ratios to one device.
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

VOCABULARY, TOKENS, BATCH, STEPS = 2000, 32, 8, 5


def gpt(blocks: int, width: int) -> keras.Model:
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(VOCABULARY, width)(tokens)
    for _ in range(blocks):
        normed = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(6, width // 6)(normed, normed, use_causal_mask=True)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x)))
    return keras.Model(tokens, layers.Dense(VOCABULARY)(x))


class Contender:
    """One strategy's model, and what is done with it."""

    def __init__(self, strategy: tf.distribute.Strategy, blocks: int, width: int):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            self.model = gpt(blocks, width)
            self.model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        self.tokens = np.random.default_rng(0).integers(0, VOCABULARY, size=(STEPS * BATCH, TOKENS))
        self.milliseconds: dict[str, list[float]] = {}

    def time(self, name: str, action: Callable[[], Any]) -> None:
        start = time.perf_counter()
        action()
        self.milliseconds.setdefault(name, []).append(1e3 * (time.perf_counter() - start))

    def fit(self) -> None:
        self.model.fit(self.tokens, self.tokens, batch_size=BATCH, verbose=0)

    def turn(self, is_warm_up: bool = False) -> None:
        batch = self.tokens[:BATCH]
        actions = {
            "fit": self.fit,
            "after_step": lambda: self.model(batch[:1]).numpy(),
            "eager": lambda: self.model(batch[:1]).numpy(),
            "predict": lambda: self.model.predict(batch, batch_size=BATCH, verbose=0),
            "evaluate": lambda: self.model.evaluate(batch, batch, batch_size=BATCH, verbose=0),
        }
        for name, action in actions.items():
            action() if is_warm_up else self.time(name, action)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    arguments = parser.parse_args()
    devices = tfdist.use_logical_cpus(arguments.devices)
    strategies = {
        "one device": tf.distribute.get_strategy(),
        "mirrored": tf.distribute.MirroredStrategy(devices),
        **{f"stage {stage}": tfdist.ShardedStrategy(devices, zero_stage=stage) for stage in arguments.stages},
    }
    contenders = {name: Contender(strategy, arguments.blocks, arguments.width) for name, strategy in strategies.items()}
    for contender in contenders.values():
        contender.time("first_fit", contender.fit)
        contender.turn(is_warm_up=True)
    for _ in range(arguments.rounds):
        for contender in contenders.values():
            contender.turn()
    medians = {
        name: {what: round(float(np.median(found)), 1) for what, found in contender.milliseconds.items()}
        for name, contender in contenders.items()
    }
    for name, found in medians.items():
        print(json.dumps({"case": name, "devices": arguments.devices, "rounds": arguments.rounds, "milliseconds": found}))
    kinds = list(medians["one device"])
    print(f"{'over one device':16}" + "".join(f"{kind:>12}" for kind in kinds))
    for name, found in medians.items():
        print(f"{name:16}" + "".join(f"{found[kind] / medians['one device'][kind]:12.2f}" for kind in kinds))


if __name__ == "__main__":
    main()
