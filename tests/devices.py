"""The devices that tests train on: four logical CPUs, or parts of one card.

Whoever has a card runs the tests of numbers on it, each process of pytest with so many MiB for each of four parts:

    TFDIST_TESTS_GPU_MIB=900 pytest -n 12 tests/programs tests/parity tests/keras_layers

TensorFloat-32 is off then, and XLA for what runs on one device. Tests of what only CPUs do, and tests that start processes of
their own, are skipped there.
"""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

_VARIABLE = "TFDIST_TESTS_GPU_MIB"
_MIB = 2**20
_ROUNDING = 1e-5  # of the largest element: what steps in float32 differ by that add in another order


def kind() -> str:
    return "GPU" if os.environ.get(_VARIABLE) else "CPU"


def names(n: int) -> list[str]:
    """Returns the names of the first `n` devices."""
    return [f"{kind()}:{index}" for index in range(n)]


def is_on(operation: tf.Operation, rank: int) -> bool:
    """Whether `operation`, of a graph that one process traced, stands on the device of `rank`."""
    return operation.device.endswith(f":{kind()}:{rank}")


def take(n: int) -> list[str]:
    """Makes `n` devices, before TensorFlow has started, and returns their names."""
    if kind() == "CPU":
        return tfdist.use_logical_cpus(n)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    # On one GPU Keras has XLA compile what a test compares with: seconds for each small model.
    assert callable(keras.Model._resolve_auto_jit_compile)
    keras.Model._resolve_auto_jit_compile = lambda model: False
    return tfdist.use_logical_gpus(n, memory_per_device=int(os.environ[_VARIABLE]) * _MIB)


def of_cpus(reason: str) -> pytest.MarkDecorator:
    """Marks a test, or a case, of what only CPUs do; on a card it is skipped."""
    return pytest.mark.skipif(kind() == "GPU", reason=f"of CPUs: {reason}")


def assert_same_bits(found: Any, expected: Any, err_msg: str = "", outliers: float = 0.0) -> None:
    """Asserts that two trainings came to the same: bit by bit on CPUs, within rounding on a card.

    Kernels of GPUs that add with atomic operations add in another order each time.

    Args:
        outliers: the part of the elements that may differ by more on a card, where numbers travel as codes: a sum on the border
            between two codes takes the one or the other.
    """
    if kind() == "CPU":
        np.testing.assert_array_equal(found, expected, err_msg=err_msg)
        return
    found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    assert found.shape == expected.shape, err_msg
    differs = ~np.isclose(found, expected, rtol=0, atol=_ROUNDING * np.abs(expected).max(initial=0.0))
    if np.count_nonzero(differs) > outliers * differs.size:
        np.testing.assert_allclose(found, expected, rtol=0, atol=_ROUNDING * np.abs(expected).max(initial=0.0), err_msg=err_msg)
