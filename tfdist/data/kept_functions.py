"""Functions of datasets that were traced once and serve all datasets of a kind.

Keras makes a dataset at each call of `fit`, `evaluate` and `predict`, and TensorFlow traces the functions of each anew, which
takes as long as a small batch. What tfdist's own functions compute depends on the elements' kind alone.
"""

from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.distribute import device_util
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_dataset_ops

# Of so many kinds of elements, times devices, the functions are kept.
_LIMIT = 256


def kept() -> dict[Hashable, Any]:
    """The functions of the present context. On the context itself, because they refer to it: they go together."""
    return vars(context.context()).setdefault("_tfdist_dataset_functions", {})


def keep(key: Hashable, functions: Any) -> None:
    """Keeps `functions` under `key`, for the strategy's later calls."""
    if len(kept()) >= _LIMIT:
        kept().clear()
    kept()[key] = functions


def flat_map(dataset: tf.data.Dataset, function: Callable[..., tf.data.Dataset], key: Hashable) -> tf.data.Dataset:
    """Returns `dataset.flat_map(function)`: of one `key` all compute the same of elements of one kind, and capture nothing."""
    if not tf.executing_eagerly():
        return dataset.flat_map(function)
    key = ("flat_map", key, device_util.current(), tf.data.DatasetSpec(dataset.element_spec))
    if key not in kept():
        mapped = dataset.flat_map(function)
        keep(key, mapped._map_func)
        return mapped
    return _FlatMap(dataset, kept()[key])


class _FlatMap(dataset_ops.UnaryDataset):
    """The dataset that `Dataset.flat_map` makes, of a function that has been traced."""

    def __init__(self, dataset: tf.data.Dataset, function: Any):
        self._name, self._map_func = None, function  # the context forgets a function that no object refers to
        flat = tf.nest.flatten(function.output_structure._element_spec)
        self._structure = tf.nest.pack_sequence_as(dataset.element_spec, flat)
        mapped = gen_dataset_ops.flat_map_dataset(dataset._variant_tensor, [], f=function.function, **self._common_args)
        super().__init__(dataset, mapped)

    element_spec = property(lambda self: self._structure)

    def _functions(self) -> list[Any]:
        return [self._map_func]
