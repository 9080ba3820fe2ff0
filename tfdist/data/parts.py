"""Parts of the data that each worker reads for itself, made equally long.

    5 and 4 batches, one device a worker     #####    ####.           a dot is a batch without rows
    5 and 4 batches, two devices a worker    #####.   ####..          in steps of two batches: three for both
    5 batches and an endless part            #####...    ####...

So every worker takes as many steps as the longest part has, and no row is left out.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.data.end_of_data import EndOfData

UNKNOWN, ENDLESS = tf.data.UNKNOWN_CARDINALITY, tf.data.INFINITE_CARDINALITY


def number_of_batches(dataset: tf.data.Dataset) -> int:
    """Returns how many batches `dataset` has; `UNKNOWN` in a graph, too."""
    return int(dataset.cardinality()) if tf.executing_eagerly() else UNKNOWN


def times_as_long(made: tf.data.Dataset, dataset: tf.data.Dataset, times: int = 1) -> tf.data.Dataset:
    """Returns `made`, which has so many elements for each of `dataset`, with its length, where that of `dataset` is known.

    It raises while it is read when it has fewer or more. So does `times_as_long(dataset, dataset)`.
    """
    length = tf.get_static_value(dataset.cardinality())
    if length is None or length == UNKNOWN:
        return made
    return made.apply(tf.data.experimental.assert_cardinality(length * times if length > 0 else length))


def with_spec(dataset: tf.data.Dataset, element_spec: Any) -> tf.data.Dataset:
    """Returns `dataset`, of which less is known, or more than it says itself."""
    same = tf.data.experimental.from_variant(tf.data.experimental.to_variant(dataset), element_spec)
    return same.with_options(dataset.options())


def repeated(dataset: tf.data.Dataset, times: int) -> tf.data.Dataset:
    """Returns a dataset with each element of `dataset` so many times: for the ranks of one copy of the model."""
    if not isinstance(dataset, tf.data.Dataset):
        raise errors.value_error("The function must return a `tf.data.Dataset` of this worker's part.", dataset=dataset)
    if times == 1:
        return dataset

    one = tf.data.Dataset.zip((dataset,))  # a tuple, too, comes as one argument
    again = one.flat_map(lambda element: tf.data.Dataset.from_tensors(element).repeat(times))
    return times_as_long(again, dataset, times)


def description(dataset: tf.data.Dataset) -> str:
    """Returns what other workers have to know of this worker's part, `dataset`."""
    spec = dataset.element_spec
    return json.dumps([number_of_batches(dataset), str(rows_unknown(spec)), str(spec)])


def as_long_as_others(
    dataset: tf.data.Dataset, descriptions: Sequence[str], ends: EndOfData, devices: int
) -> tuple[tf.data.Dataset, int, EndOfData | None]:
    """Returns this worker's part as one that ends when those of all workers do.

    Args:
        dataset: this worker's part; each device gets one of its batches in a step.
        descriptions: those of the parts of all workers.
        ends: how workers tell each other where their parts end.
        devices: how many devices a worker has.

    Returns:
        The dataset, the number of its steps, and how its end is told: None, if all workers know it.

    Raises:
        ValueError: on every worker, when the batches differ in more than their rows, or workers that read the same part have
            another number of batches.
    """
    numbers, kinds, specs = zip(*map(json.loads, descriptions), strict=True)
    for other, (number, kind) in enumerate(zip(numbers, kinds, strict=True)):
        first = ends.parts.index(ends.parts[other])
        if kind != kinds[0]:
            raise errors.value_error(
                f"The batches that workers read for themselves must be of one kind, whatever their number of rows, but "
                f"{ends.tasks[0]} has {kinds[0]} and {ends.tasks[other]} has {kind}.",
                fix="Use the same dtypes and shapes in the function that is given to `distribute_datasets_from_function`.",
            )
        if number != numbers[first]:
            raise errors.value_error(
                f"Workers of one copy of the model read the same part of the data, but that of {ends.tasks[first]} has "
                f"{numbers[first]} batches and that of {ends.tasks[other]} has {number}.",
                fix="Choose the part by `context.input_pipeline_id`, which these workers have in common.",
            )
    steps = longest(number if number < 0 else -(-number // devices) for number in numbers)  # each device gets a batch a step
    if steps == UNKNOWN:
        return (of_any_rows(dataset), steps, ends) if len(numbers) > 1 or devices > 1 else (dataset, steps, None)
    dataset = times_as_long(dataset, dataset)
    if any(number != steps * devices for number in numbers) and num_unknown_sizes(dataset.element_spec):
        return of_any_rows(dataset), steps, ends  # a batch without rows has the sizes of another worker's, which are told
    if len(set(numbers)) == len(set(specs)) == 1 and (steps == ENDLESS or numbers[0] == steps * devices):
        return dataset, steps, None
    return padded(dataset, steps if steps == ENDLESS else steps * devices), steps, None


def longest(steps: Iterable[int]) -> int:
    """Returns the most of several numbers of steps, of which any may be `ENDLESS`; `UNKNOWN` if one of them is."""
    steps = set(steps)
    return next((special for special in (UNKNOWN, ENDLESS) if special in steps), max(steps))


def padded(dataset: tf.data.Dataset, num_batches: int) -> tf.data.Dataset:
    """Returns `dataset`, and after it batches without rows, so that it has `num_batches`, of any number of rows each."""
    own, any_rows = int(dataset.cardinality()), of_any_rows(dataset)
    missing = 0 if own == ENDLESS else -1 if num_batches == ENDLESS else num_batches - own
    if missing == 0:
        return any_rows
    spec = any_rows.element_spec
    return any_rows.concatenate(with_spec(tf.data.Dataset.from_tensors(without_rows(spec, [])), spec).repeat(missing))


def of_any_rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset` as one whose batches may have any number of rows, whatever it knows of them."""
    spec = rows_unknown(dataset.element_spec)
    return dataset if spec == dataset.element_spec else with_spec(dataset, spec)


def rows_unknown(element_spec: Any) -> Any:
    """Returns `element_spec` without the number of rows."""

    def of_leaf(spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec) or not spec.shape.rank:
            return spec
        shape = tf.TensorShape([None]).concatenate(spec.shape[1:])
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
        return type(spec)(shape, spec.dtype)

    return tf.nest.map_structure(of_leaf, element_spec)


def _unknown_axes(spec: Any) -> list[int]:
    """Returns the axes, but for that of the rows and ragged ones, whose sizes a tensor's `spec` does not know."""
    if not isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec) or spec.shape.rank is None:
        return []
    first = 1 + getattr(spec, "ragged_rank", 0)
    return [axis for axis, size in enumerate(spec.shape) if axis >= first and size is None]


def num_unknown_sizes(element_spec: Any) -> int:
    """Returns how many `unknown_sizes` a batch of `element_spec` has."""
    return sum(len(_unknown_axes(spec)) for spec in tf.nest.flatten(element_spec))


def unknown_sizes(batch: Any, element_spec: Any) -> tf.Tensor:
    """Returns the sizes of a batch that its `element_spec` does not know, but for the rows: int64, one after the other."""
    sizes = []
    for spec, leaf in zip(tf.nest.flatten(element_spec), tf.nest.flatten(batch), strict=True):
        for axis in _unknown_axes(spec):
            if isinstance(leaf, tf.SparseTensor):
                sizes.append(leaf.dense_shape[axis])
            elif isinstance(leaf, tf.RaggedTensor):
                sizes.append(tf.shape(leaf.flat_values, out_type=tf.int64)[axis - leaf.ragged_rank])
            else:
                sizes.append(tf.shape(leaf, out_type=tf.int64)[axis])
    return tf.stack(sizes)


def without_rows(element_spec: Any, sizes: Sequence[Any]) -> Any:
    """Returns a batch of `element_spec` that has no rows, and the `unknown_sizes` `sizes`."""
    remaining = iter(sizes)

    def shape_of(spec: Any, first: int = 1) -> list[Any]:
        unknown = _unknown_axes(spec)
        return [next(remaining) if axis in unknown else spec.shape[axis] for axis in range(first, spec.shape.rank)]

    def of_leaf(spec: Any) -> Any:
        if isinstance(spec, tf.RaggedTensorSpec):
            values = tf.zeros([0, *shape_of(spec, spec.ragged_rank + 1)], spec.dtype)
            splits = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
            return tf.RaggedTensor.from_nested_row_splits(values, splits, validate=False) if splits else values
        if isinstance(spec, tf.SparseTensorSpec):
            shape = tf.stack([tf.cast(size, tf.int64) for size in [0, *shape_of(spec)]])
            return tf.SparseTensor(tf.zeros([0, spec.shape.rank], tf.int64), tf.zeros([0], spec.dtype), shape)
        if isinstance(spec, tf.TensorSpec):
            return tf.zeros([0, *shape_of(spec)] if spec.shape.rank else [], spec.dtype)
        if isinstance(spec, tf.NoneTensorSpec):
            return None
        raise errors.not_implemented(
            f"A worker whose part has ended has no {type(spec).__name__} without rows to take part with.",
            element_spec=element_spec,
            fix="Turn it into tensors with `dataset.map(...)`, or give all workers parts of one length.",
        )

    return tf.nest.map_structure(of_leaf, element_spec)
