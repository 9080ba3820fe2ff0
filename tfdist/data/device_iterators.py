"""The iterators by which a process's devices get their elements: traced once, and without a tuning thread.

TensorFlow's `OwnedMultiDeviceIterator` gives every device a small dataset of its own, a generator and a prefetch. Two things of
it are different for tfdist's strategies:

* A generator has seven functions, which TensorFlow traces for every device of every iterator; Keras makes two iterators an epoch.
  Here the functions are kept, and the next iterator over elements of the same kind calls them with arguments of its own: half of
  the time that an iterator takes, 0.1 s with four CPUs. They live as long as TensorFlow's context, which knows them by name.
* There is nothing in it to tune. TensorFlow 2.21 still starts a tuning thread for each, which sleeps twice as long every time, up
  to a minute; and who deletes the iterator waits, with Python's lock held, until it wakes. So the end of every epoch stood still
  for up to as long again as the epoch had taken. The user's own dataset keeps its tuning.

The names are private to TensorFlow: tests/data/test_device_iterators.py fails when they change.

    DistributedDataset.__iter__, DistributedDatasetsFromFunction.__iter__    know the strategy
    multi_device_iterator_ops._PerDeviceGenerator                            traces the functions of a device
    multi_device_iterator_ops._ReincarnatedPerDeviceGenerator                a copy of it
    multi_device_iterator_ops._create_device_dataset                         makes a device's dataset
    context.context()                                                        owns the functions: a reset makes another
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import device_util, input_lib
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_dataset_ops

from tfdist.override import override
from tfdist.sharding import config_of

_making = threading.local()
# Of so many kinds of elements, times devices, the functions are kept.
_KEPT = 256


@dataclasses.dataclass(frozen=True)
class _Functions:
    """The traced functions of a generator, each with the names of its arguments."""

    init: tuple[Any, list[str]]
    next: tuple[Any, list[str]]
    finalize: tuple[Any, list[str]]

    @classmethod
    def of(cls, generator: Any, source_device: tf.Tensor, incarnation_id: tf.Tensor) -> _Functions:
        known = {id(source_device): "source device", id(incarnation_id): "incarnation"}

        def names(arguments: Sequence[tf.Tensor], other: str) -> list[str]:
            return [known.get(id(argument), other) for argument in arguments]

        return cls(
            (generator._init_func, names(generator._init_captured_args, "handle")),
            (generator._next_func, names(generator._next_captured_args, "iterator")),
            (generator._finalize_func, names(generator._finalize_captured_args, "unknown")),
        )


def _kept() -> dict[Hashable, _Functions]:
    """The functions of the present context. On the context itself, because they refer to it: they go together."""
    return vars(context.context()).setdefault("_tfdist_iterator_functions", {})


@override("__iter__", input_lib.DistributedDataset, input_lib.DistributedDatasetsFromFunction)
def _iter(original: Callable[..., Iterator[Any]], self: Any) -> Iterator[Any]:
    before = getattr(_making, "ours", False)
    _making.ours = config_of(self._strategy) is not None
    try:
        return original(self)
    finally:
        _making.ours = before


@override("__init__", multi_device_iterator_ops._PerDeviceGenerator)
def _init_generator(
    original: Callable[..., None],
    self: Any,
    shard_num: int,
    multi_device_iterator_resource: tf.Tensor,
    incarnation_id: tf.Tensor,
    source_device: tf.Tensor,
    element_spec: Any,
    iterator_is_anonymous: bool,
) -> None:
    key = (device_util.current(), shard_num, tuple(tf.nest.flatten(element_spec)))
    may_be_kept = getattr(_making, "ours", False) and iterator_is_anonymous and tf.executing_eagerly()
    kept = _kept() if may_be_kept else {}
    functions = kept.get(key)
    if functions is None:
        original(
            self, shard_num, multi_device_iterator_resource, incarnation_id, source_device, element_spec, iterator_is_anonymous
        )
        if may_be_kept:
            if len(kept) >= _KEPT:
                kept.clear()
            kept[key] = _Functions.of(self, source_device, incarnation_id)
        return
    arguments = {
        "source device": source_device,
        "incarnation": incarnation_id,
        "iterator": multi_device_iterator_resource,
        "handle": gen_dataset_ops.multi_device_iterator_to_string_handle(multi_device_iterator_resource),
    }
    self._element_spec = element_spec
    self._name = f"device_generator_{shard_num}"
    self._is_ready = True
    variant = gen_dataset_ops.generator_dataset(
        *([arguments[name] for name in names] for _, names in (functions.init, functions.next, functions.finalize)),
        init_func=functions.init[0],
        next_func=functions.next[0],
        finalize_func=functions.finalize[0],
        **self._flat_structure,
    )
    tf.data.Dataset.__init__(self, variant)


@override("__init__", multi_device_iterator_ops._ReincarnatedPerDeviceGenerator)
def _init_copy(original: Callable[..., None], self: Any, per_device_dataset: Any, incarnation_id: tf.Tensor) -> None:
    if not getattr(per_device_dataset, "_is_ready", False):
        original(self, per_device_dataset, incarnation_id)
        return
    self._element_spec = per_device_dataset.element_spec
    self._name = per_device_dataset._name
    tf.data.Dataset.__init__(self, per_device_dataset._variant_tensor)


@override("_create_device_dataset", multi_device_iterator_ops)
def _create_device_dataset(original: Callable[..., tf.data.Dataset], *args: Any) -> tf.data.Dataset:
    dataset = original(*args)
    if not getattr(_making, "ours", False):
        return dataset
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    return dataset.with_options(untuned)
