"""The iterators by which a process's devices get their elements: traced once, and without a tuning thread.

TensorFlow's `OwnedMultiDeviceIterator` gives every device a small dataset of its own, a generator and a prefetch. Two things of
it are different for tfdist's strategies:

* A generator has seven functions, which TensorFlow traces for every device of every iterator; Keras makes two iterators an epoch.
  Here the functions are kept, and the next iterator over elements of the same kind calls them with arguments of its own: half of
  the time that an iterator takes, 0.1 s with four CPUs. They live as long as TensorFlow's context, which knows them by name.
* There is nothing in it to tune. TensorFlow 2.21 still starts a tuning thread for each, which sleeps twice as long every time, up
  to a minute; and who deletes the iterator waits, with Python's lock held, until it wakes. So the end of every epoch stood still
  for up to as long again as the epoch had taken. The user's own dataset keeps its tuning.

`generator` and `iterator` below stand for TensorFlow's objects, whose attributes are private: tests/data/test_device_iterators.py
fails when they change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import device_util
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_dataset_ops

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


@contextlib.contextmanager
def making(*, ours: bool) -> Iterator[None]:
    """Within it, the iterator of a tfdist strategy is made, or, not `ours`, of another."""
    before = getattr(_making, "ours", False)
    _making.ours = ours
    try:
        yield
    finally:
        _making.ours = before


def is_ours() -> bool:
    """Whether the iterator that is being made is a tfdist strategy's."""
    return getattr(_making, "ours", False)


def init_generator(
    original: Callable[..., None],
    generator: Any,
    shard_num: int,
    multi_device_iterator_resource: tf.Tensor,
    incarnation_id: tf.Tensor,
    source_device: tf.Tensor,
    element_spec: Any,
    iterator_is_anonymous: bool,
) -> None:
    """Makes a device's generator from functions that are kept, or by `original`, TensorFlow's `__init__`, whose are then kept."""
    key = (device_util.current(), shard_num, tuple(tf.nest.flatten(element_spec)))
    may_be_kept = is_ours() and iterator_is_anonymous and tf.executing_eagerly()
    kept = _kept() if may_be_kept else {}
    functions = kept.get(key)
    if functions is None:
        iterator = (multi_device_iterator_resource, incarnation_id, source_device)
        original(generator, shard_num, *iterator, element_spec, iterator_is_anonymous)
        if may_be_kept:
            if len(kept) >= _KEPT:
                kept.clear()
            kept[key] = _Functions.of(generator, source_device, incarnation_id)
        return
    arguments = {
        "source device": source_device,
        "incarnation": incarnation_id,
        "iterator": multi_device_iterator_resource,
        "handle": gen_dataset_ops.multi_device_iterator_to_string_handle(multi_device_iterator_resource),
    }
    generator._element_spec = element_spec
    generator._name = f"device_generator_{shard_num}"
    generator._is_ready = True
    variant = gen_dataset_ops.generator_dataset(
        *([arguments[name] for name in names] for _, names in (functions.init, functions.next, functions.finalize)),
        init_func=functions.init[0],
        next_func=functions.next[0],
        finalize_func=functions.finalize[0],
        **generator._flat_structure,
    )
    tf.data.Dataset.__init__(generator, variant)


def is_made_of_kept_functions(generator: Any) -> bool:
    """Whether `init_generator` has made a device's generator without TensorFlow's `__init__`."""
    return getattr(generator, "_is_ready", False)


def init_copy(copy: Any, generator: Any) -> None:
    """Makes a copy of a generator that is made of kept functions."""
    copy._element_spec = generator.element_spec
    copy._name = generator._name
    tf.data.Dataset.__init__(copy, generator._variant_tensor)


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset` without a tuning thread."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
