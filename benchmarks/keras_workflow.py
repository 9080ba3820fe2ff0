"""Times Keras's own way of working under a strategy beside one device and `MirroredStrategy`, each in a process.

    python benchmarks/keras_workflow.py
    python benchmarks/keras_workflow.py --stages 0 3 --rounds 9
    python benchmarks/keras_workflow.py --batch 64

A small GPT (6 blocks, 384 wide, 13 M parameters by default), batches of 8 rows of 32 tokens by default. Per contender: a first
`fit` of five steps with its trace, then, in turns of all contenders so that the machine's moods fall on all alike, medians of

    eager        model(x) for one row of 32 tokens, outside any `tf.function`
    after_step   the same, straight after a step that has changed the weights
    predict      `predict` of one batch
    evaluate     `evaluate` of one batch
    fit          `fit` of five steps, traced before

It prints a JSON line per contender, and tables of ratios to one device: of time, and of the processor time of all threads, which
says more where other processes use the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
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
from benchmarks.job import SHARERS

VOCABULARY, TOKENS, STEPS = 2000, 32, 5


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

    def __init__(self, strategy: tf.distribute.Strategy, blocks: int, width: int, batch: int):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            self.model = gpt(blocks, width)
            self.model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        self.batch = batch
        self.tokens = np.random.default_rng(0).integers(0, VOCABULARY, size=(STEPS * batch, TOKENS))
        self.milliseconds: dict[str, list[float]] = {}
        self.of_processors: dict[str, list[float]] = {}

    def time(self, name: str, action: Callable[[], Any]) -> None:
        start, processors = time.perf_counter(), time.process_time()
        action()
        self.milliseconds.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
        self.of_processors.setdefault(name, []).append(1e3 * (time.process_time() - processors))

    def fit(self) -> None:
        self.model.fit(self.tokens, self.tokens, batch_size=self.batch, verbose=0)

    def turn(self, is_warm_up: bool = False) -> None:
        size, batch = self.batch, self.tokens[: self.batch]
        actions = {
            "fit": self.fit,
            "after_step": lambda: self.model(batch[:1]).numpy(),
            "eager": lambda: self.model(batch[:1]).numpy(),
            "predict": lambda: self.model.predict(batch, batch_size=size, verbose=0),
            "evaluate": lambda: self.model.evaluate(batch, batch, batch_size=size, verbose=0),
        }
        for name, action in actions.items():
            action() if is_warm_up else self.time(name, action)


def contend(arguments: argparse.Namespace) -> None:
    """The program of a contender's process: a turn for each line that it reads, then the medians of what it has measured."""
    devices, case = take_devices(arguments.devices, arguments.logical_gpus), arguments.case
    if case == "one device":
        strategy = tf.distribute.get_strategy()
    elif case == "mirrored":
        strategy = tf.distribute.MirroredStrategy(devices)
    else:
        strategy = tfdist.ShardedStrategy(devices, zero_stage=int(case.removeprefix("stage ")))
    contender = Contender(strategy, arguments.blocks, arguments.width, arguments.batch)
    for turn, _ in enumerate(sys.stdin):
        if turn == 0:
            contender.time("first_fit", contender.fit)
        contender.turn(is_warm_up=turn == 0)
        print(json.dumps([medians(contender.milliseconds), medians(contender.of_processors)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    cases.add_logical_gpus(parser)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        contend(arguments)
        return
    found: dict[str, list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        names = ["one device", "mirrored", *(f"stage {stage}" for stage in arguments.stages)]
        command = [sys.executable, *sys.argv, "--case"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        pipes["env"] = {**os.environ, SHARERS: str(len(names))}
        contenders = {case: stack.enter_context(subprocess.Popen([*command, case], **pipes)) for case in names}
        for _ in range(1 + arguments.rounds):
            for case, process in contenders.items():
                found[case] = take_turn(case, process)
    for case, (milliseconds, of_processors) in found.items():
        what = {"case": case, "devices": arguments.devices, "batch": arguments.batch, "rounds": arguments.rounds}
        print(json.dumps({**what, "milliseconds": milliseconds, "of_processors": of_processors}))
    for number, title in enumerate(("time, over one", "processors' time")):
        one = found["one device"][number]
        print(f"{title:16}" + "".join(f"{kind:>12}" for kind in one))
        for case, values in found.items():
            print(f"{case:16}" + "".join(f"{values[number][kind] / one[kind]:12.2f}" for kind in one))


def take_turn(case: str, process: subprocess.Popen[str]) -> list[dict[str, float]]:
    """Lets the process of contender `case` take a turn; returns its medians.

    Raises:
        SystemExit: the process has ended, with its name and exit code. What it had to say stands on stderr.
    """
    try:
        print("turn", file=process.stdin, flush=True)
    except BrokenPipeError:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # else what it was sent would be sent again at the end
    answer = process.stdout.readline()
    if not answer:
        code = process.wait()
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise SystemExit(f"contender `{case}` ended with {cause}: its own messages stand above")
    return json.loads(answer)


def medians(found: dict[str, list[float]]) -> dict[str, float]:
    return {what: round(float(np.median(values)), 1) for what, values in found.items()}


if __name__ == "__main__":
    main()
