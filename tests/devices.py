"""The devices that tests train on: four logical CPUs, or parts of one card.

Whoever has a card runs the tests of numbers on it, each process of pytest with so many MiB for each of four parts:

    TFDIST_TESTS_GPU_MIB=1000 pytest -n 8 tests/programs tests/parity tests/layers

TensorFloat-32 is off then. Tests that look at a CPU's kernels or transports fail there, and tests that start processes of their
own are not for it.
"""

from __future__ import annotations

import os

import tensorflow as tf

import tfdist

_VARIABLE = "TFDIST_TESTS_GPU_MIB"
_MIB = 2**20


def kind() -> str:
    return "GPU" if os.environ.get(_VARIABLE) else "CPU"


def names(n: int) -> list[str]:
    """Returns the names of the first `n` devices."""
    return [f"{kind()}:{index}" for index in range(n)]


def take(n: int) -> list[str]:
    """Makes `n` devices, before TensorFlow has started, and returns their names."""
    if kind() == "CPU":
        return tfdist.use_logical_cpus(n)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    return tfdist.use_logical_gpus(n, memory_per_device=int(os.environ[_VARIABLE]) * _MIB)
