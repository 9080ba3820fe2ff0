"""TensorFlow itself: AutoGraph leaves tfdist's code as it is, and the iterators of a strategy's devices are made at less cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import config

from tfdist.data import device_iterators
from tfdist.keras_hooks.table import replaces
from tfdist.sharding import config_of

_INPUT = "tensorflow.python.distribute.input_lib"
_MULTI_DEVICE = "tensorflow.python.data.ops.multi_device_iterator_ops"


@replaces(
    "tensorflow.python.autograph.core.config",
    "CONVERSION_RULES",
    why="""A `tf.function` rewrites the Python of what it calls, library code too unless the library is listed here, as TensorFlow
    and Keras are.""",
)
def _conversion_rules(rules: tuple[Any, ...]) -> tuple[Any, ...]:
    return config.DoNotConvert("tfdist"), *rules


_WHOSE = "Tells the replacements below whose iterator is being made."


@replaces(f"{_INPUT}.DistributedDataset", "__iter__", signature="(self)", why=_WHOSE)
@replaces(f"{_INPUT}.DistributedDatasetsFromFunction", "__iter__", signature="(self)", why=_WHOSE)
def _iter(original: Callable[..., Iterator[Any]], self: Any) -> Iterator[Any]:
    with device_iterators.making(ours=config_of(self._strategy) is not None):
        return original(self)


@replaces(
    f"{_MULTI_DEVICE}._PerDeviceGenerator",
    "__init__",
    signature="""(self, shard_num, multi_device_iterator_resource, incarnation_id, source_device, element_spec, \
iterator_is_anonymous)""",
    why="TensorFlow traces seven functions for every device of every iterator; here they are traced once.",
)
def _init_generator(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    device_iterators.init_generator(original, self, *args, **kwargs)


@replaces(
    f"{_MULTI_DEVICE}._ReincarnatedPerDeviceGenerator",
    "__init__",
    signature="(self, per_device_dataset, incarnation_id)",
    why="A copy of such a generator has no traced functions of its own to copy.",
)
def _init_copy(original: Callable[..., None], self: Any, per_device_dataset: Any, incarnation_id: tf.Tensor) -> None:
    if device_iterators.is_made_of_kept_functions(per_device_dataset):
        device_iterators.init_copy(self, per_device_dataset)
    else:
        original(self, per_device_dataset, incarnation_id)


@replaces(
    _MULTI_DEVICE,
    "_create_device_dataset",
    signature="(prototype_ds, incarnation_id, prefetch_buffer_size, experimental_slack)",
    why="TensorFlow starts a tuning thread for a dataset that has nothing to tune, and the end of an epoch waits for it.",
)
def _create_device_dataset(original: Callable[..., tf.data.Dataset], *args: Any) -> tf.data.Dataset:
    dataset = original(*args)
    return device_iterators.untuned(dataset) if device_iterators.is_ours() else dataset
