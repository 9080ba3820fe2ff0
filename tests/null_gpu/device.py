"""For programs that run on null GPUs: what a test tells the devices."""

from __future__ import annotations

import ctypes

import tensorflow as tf


def note(text: str) -> None:
    """Writes a mark to the log of this process."""
    _driver().null_gpu_note(text.encode())


def set_condition(value: bool) -> None:
    """Says what each bool or int32 that the host reads from a device is, from now on: no kernel computes it."""
    _driver().null_gpu_set_condition(int(value))


def set_pace(times: int) -> None:
    """Has products and messages take so many times as long as the machine says, from now on; 0: none."""
    _driver().null_gpu_set_pace(times)


def wait_for_all() -> None:
    """Waits until this process's devices have done what is queued: TensorFlow's `sync_devices` fails in a job of several."""
    for index in range(len(tf.config.list_physical_devices("GPU"))):
        with tf.device(f"GPU:{index}"):
            tf.zeros([1]).numpy()


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
