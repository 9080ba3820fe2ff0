"""Runs Keras's own distribution tests, as installed with Keras, with tfdist's strategy in the place of `MirroredStrategy`.

    python -m tests.keras_suite.run [zero_stage ...]

Prints one JSON object: per zero_stage and case "passed", "skipped: reason", or the traceback. In a process of its own, because
these tests reset TensorFlow's context and set the number of logical CPUs.
"""

from __future__ import annotations

import importlib
import json
import sys
import unittest
from collections.abc import Sequence

import tensorflow as tf

import tfdist

MODULES = ("keras.src.backend.tensorflow.distribute_test", "keras.src.backend.tensorflow.optimizer_distribute_test")


def strategy_class(zero_stage: int) -> type:
    """Returns a class that is called as `MirroredStrategy` is and makes a `ShardedStrategy`."""

    class InThePlaceOfMirrored(tfdist.ShardedStrategy):
        def __init__(self, devices: Sequence[str] | None = None):
            super().__init__(devices, zero_stage=zero_stage)

    return InThePlaceOfMirrored


def outcomes(zero_stage: int) -> dict[str, str]:
    """Runs every case at `zero_stage`."""
    modules = [importlib.import_module(name) for name in MODULES]
    mirrored = tf.distribute.MirroredStrategy
    tf.distribute.MirroredStrategy = strategy_class(zero_stage)
    try:
        found = {}
        for module in modules:
            for case in cases(unittest.defaultTestLoader.loadTestsFromModule(module)):
                result = unittest.TestResult()
                case.run(result)
                name = case.id().removeprefix(f"{module.__name__}.")
                failed = [text for _, text in (*result.errors, *result.failures)]
                skipped = [f"skipped: {reason}" for _, reason in result.skipped]
                found[name] = "\n".join(failed or skipped) or "passed"
    finally:
        tf.distribute.MirroredStrategy = mirrored
    return found


def cases(suite: unittest.TestSuite) -> list[unittest.TestCase]:
    return [case for part in suite for case in (cases(part) if isinstance(part, unittest.TestSuite) else [part])]


def main(stages: Sequence[int]) -> None:
    print(json.dumps({stage: outcomes(stage) for stage in stages}))


if __name__ == "__main__":
    main([int(stage) for stage in sys.argv[1:]] or range(4))
