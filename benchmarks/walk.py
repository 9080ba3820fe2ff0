"""How many files of tfdist one gradient goes through, from the tape to the weight: of a traced step of `fit`, one `Dense`, SGD.

    python -m benchmarks.walk --stages 2 3

A stay is a stretch of time within one file, whatever other libraries do meanwhile. A file that is entered again, after another
one, is returned to: stays = files + returns. Helper files, which say nothing of gradients, do not count.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import sys
import threading
from types import FrameType

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import tfdist

ROOT = str(pathlib.Path(tfdist.__file__).parent) + os.sep
HELPERS = ("errors.py", "temporary.py", "custom_gradients.py", "extensible.py", "tables.py", "graphs/", "keras_hooks/table.py")


class Walk:
    """The files of tfdist in which a thread is, one after the other, from a tape's `gradient` to the step's end.

    It is a profile function of Python's, and follows the thread of the rank that is traced first.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self._frames: list[tuple[FrameType, str | None]] = []  # that are entered, with their file of tfdist
        self._begins: FrameType | None = None  # the step that has called the tape
        self._thread = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self._begins is None:
            caller, given = frame.f_back, frame.f_locals.get("args") or (None,)
            if event != "call" or caller is None or caller.f_code.co_name != "train_step":
                return
            if not isinstance(given[0], tf.GradientTape):  # its `gradient`, as tfdist has it
                return
            self._begins, self._thread = caller, threading.get_ident()
        if threading.get_ident() != self._thread:
            return
        if event == "call":
            file = frame.f_code.co_filename
            of_tfdist = file.removeprefix(ROOT) if file.startswith(ROOT) else None
            self._frames.append((frame, None if of_tfdist is None or of_tfdist.startswith(HELPERS) else of_tfdist))
        elif event == "return" and frame is self._begins:
            sys.setprofile(None)
        elif event == "return" and self._frames and self._frames[-1][0] is frame:
            self._frames.pop()
        here = next((file for _, file in reversed(self._frames) if file is not None), None)
        if here is not None and (not self.files or self.files[-1] != here):
            self.files.append(here)


def walk_of(zero_stage: int) -> Walk:
    """Traces a step of `fit` at `zero_stage`, and returns the walk of the first rank."""
    keras.utils.set_random_seed(0)
    strategy = tfdist.ShardedStrategy(tfdist.use_logical_cpus(2), zero_stage=zero_stage)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    rng = np.random.default_rng(0)
    data = tf.data.Dataset.from_tensor_slices((rng.normal(size=(4, 8)), rng.normal(size=(4, 6)))).batch(4, drop_remainder=True)
    walk = Walk()
    threading.setprofile(walk)  # of the ranks' threads
    try:
        model.fit(data, verbose=0)
    finally:
        threading.setprofile(None)
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--files", action="store_true", help="print how often each file is entered")
    args = parser.parse_args()
    print(f"{'stage':>5} {'files':>6} {'stays':>6} {'returns':>8}")
    for stage in args.stages:
        walk = walk_of(stage)
        entered = collections.Counter(walk.files)
        stays = len(walk.files)
        print(f"{stage:5} {len(entered):6} {stays:6} {stays - len(entered):8}")
        if args.files:
            print("\n".join(f"{count:5} {file}" for file, count in entered.most_common()))
        found = {"benchmark": "walk", "zero_stage": stage, "files": len(entered), "stays": stays, "returns": stays - len(entered)}
        print(json.dumps(found))


if __name__ == "__main__":
    main()
