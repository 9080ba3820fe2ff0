"""The iterators by which a process's devices get their elements: without TensorFlow's tuning thread.

Each device of a process reads from a small dataset of its own, a generator and a prefetch, with nothing in it to tune. TensorFlow
2.21 still starts a tuning thread for each, which sleeps twice as long every time, up to a minute; and who deletes the iterator
waits, with Python's lock held, until it wakes. So the end of every epoch stood still for up to as long again as the epoch had
taken. The user's own dataset keeps its tuning.

The names are private to TensorFlow: tests/data/test_device_iterators.py fails when they change.

    DistributedDataset.__iter__, DistributedDatasetsFromFunction.__iter__    know the strategy
    multi_device_iterator_ops._create_device_dataset                         makes a device's dataset
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import input_lib

from tfdist.override import override
from tfdist.sharding import config_of

_making = threading.local()


@override("__iter__", input_lib.DistributedDataset, input_lib.DistributedDatasetsFromFunction)
def _iter(original: Callable[..., Iterator[Any]], self: Any) -> Iterator[Any]:
    before = getattr(_making, "ours", False)
    _making.ours = config_of(self._strategy) is not None
    try:
        return original(self)
    finally:
        _making.ours = before


@override("_create_device_dataset", multi_device_iterator_ops)
def _create_device_dataset(original: Callable[..., tf.data.Dataset], *args: Any) -> tf.data.Dataset:
    dataset = original(*args)
    if not getattr(_making, "ours", False):
        return dataset
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    return dataset.with_options(untuned)
