"""One iterator for all devices of a worker, which take its elements in turn: for devices that share a memory.

    TensorFlow, for each device    dataset -> buffer -> function on the host -> function on the device -> prefetch -> iterator
    here, for all                  dataset -> iterator

What TensorFlow does brings elements to devices with memories of their own before they are wanted. A CPU finds an element where
the dataset has put it, so that nothing is gained; and every iterator begins by making those functions ready to run, which with
two CPUs was 60 % of the time that it took. Keras makes two iterators at each `evaluate` and `predict`, and an epoch of `fit`.
"""

from typing import Any

import tensorflow as tf


class InTurn:
    """An iterator `elements` for `num_devices` devices; it stands where TensorFlow has an iterator over a worker's devices."""

    def __init__(self, elements: Any, num_devices: int):
        self.elements, self._num_devices = elements, num_devices

    def get_next_as_list(self, name: str | None = None) -> list[Any]:
        return [self.elements.get_next() for _ in range(self._num_devices)]

    def get_next_as_optional_list(self) -> list[tf.experimental.Optional]:
        return [self.elements.get_next_as_optional() for _ in range(self._num_devices)]
