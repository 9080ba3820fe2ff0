"""A dataset of global batches, split in the pieces of this process's devices.

    a global batch of 10 rows, `num_parts` = 4        data 0    data 1    data 2  data 3
                                                      0 1 2  |  3 4 5  |  6 7  |  8 9
    worker 0, parts (0, 1), yields                    0 1 2  ,  3 4 5
    worker 1, parts (2, 3), yields                                        6 7  ,  8 9

Note: every worker reads the global batch
    All workers run the same program, so all build the same dataset of global batches. Each worker iterates the whole dataset and
    keeps its own rows: order, shuffling, partial last batches and what `batch` drops are those of one process, by construction.
    TensorFlow's auto-sharding instead shards the *source* and batches each worker's shard, which changes the examples that meet
    in a batch. The price is that every worker reads and transforms all examples; who cannot pay it lets each worker read its own
    part of the data and batch it by the per-worker size (`distribute_datasets_from_function`).

    Batches are those of one process only if the workers' datasets agree; `dataset_signature` compares them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.data.kept_functions import flat_map

_TENSOR_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


class NothingSpec(tf.NoneTensorSpec):
    """The spec of None. TensorFlow's has no value for a rank without a batch, which `_create_empty_value` is asked for."""

    def _create_empty_value(self) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tf.NoneTensorSpec)

    __hash__ = tf.NoneTensorSpec.__hash__


def split_batches(dataset: tf.data.Dataset, num_parts: int, parts: Sequence[int]) -> tf.data.Dataset:
    """Splits each global batch in `num_parts` pieces along axis 0 and yields the pieces `parts` of it, one element a piece.

    With `n = q * num_parts + r` rows in a batch, piece `p` holds the rows

        [p * q + min(p, r),  (p + 1) * q + min(p + 1, r))          the pieces of `numpy.array_split`

    so sizes differ by at most one, larger pieces come first, and pieces are empty where `n < num_parts`.

    A dense piece is a view of the batch where it begins at a multiple of 64 bytes, a copy elsewhere; a view costs nothing, and
    keeps the global batch in memory as long as it lives. Splitting draws no random numbers and leaves the dataset's seeds as they
    are.

    Args:
        dataset: a dataset of global batches: any structure of dense, ragged and sparse tensors whose axis 0 is the batch. None
            passes unchanged, and an `Optional` that never has a value, as Keras makes of a generator's None, becomes None. A
            batch size that is known (`batch(..., drop_remainder=True)`) and divisible by `num_parts` gives pieces of static size
            `n / num_parts`; any other gives pieces of unknown size, the same for every piece.
        num_parts: how many pieces a batch has: the data-parallel size of the whole job.
        parts: the pieces to keep, each in [0, num_parts), in the order in which the dataset yields them: the data indices of a
            worker's devices, which may repeat.

    Returns:
        A dataset of the same structure, with the options of `dataset` and `len(parts)` elements for each of its batches.

    Raises:
        ValueError: `num_parts` or `parts` are out of range, or an element of `dataset` holds a scalar, or tensors with different
            numbers of rows.
        NotImplementedError: an element holds something else than tensors, such as an `Optional` of tensors or a dataset.
        tf.errors.InvalidArgumentError: while iterating, when the tensors of a batch have different numbers of rows.
    """
    parts = tuple(parts)
    _check_arguments(dataset, num_parts, parts)
    element_spec = dataset.element_spec  # the functions below may be kept, the dataset must not be
    batch_rows = _static_rows(element_spec)
    piece_rows = None if batch_rows is None or batch_rows % num_parts else batch_rows // num_parts

    def pieces(*batch: Any) -> list[Any]:
        if type(element_spec) is not tuple:  # a tuple, and nothing else, comes as several arguments
            (batch,) = batch
        # What Keras would turn into None itself, if it were no value of several devices.
        batch = tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)
        bounds, one = _bounds(_rows(batch), num_parts), tf.constant([1], tf.int64)

        def piece(part: int) -> Any:
            return tf.nest.map_structure(lambda leaf: _piece(leaf, bounds[part], bounds[part + 1], one, piece_rows), batch)

        return [piece(part) for part in parts]

    def all_pieces(*batch: Any) -> tf.data.Dataset:
        # Cheaper than a dataset of part indices, which runs one more function per piece.
        elements = map(tf.data.Dataset.from_tensors, pieces(*batch))
        return functools.reduce(tf.data.Dataset.concatenate, elements)

    if num_parts == 1 and len(parts) == 1:
        split = dataset
    else:
        split = _with_cardinality(flat_map(dataset, all_pieces, (num_parts, parts)), dataset.cardinality(), len(parts))
    return _with_nothing(split)


def _check_arguments(dataset: tf.data.Dataset, num_parts: int, parts: tuple[int, ...]) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise errors.value_error("`dataset` must be a `tf.data.Dataset`.", dataset=dataset)
    errors.check_integer("num_parts", num_parts, least=1)
    if not parts or not all(isinstance(part, int) and 0 <= part < num_parts for part in parts):
        raise errors.value_error(f"`parts` must name at least one piece, each an integer in [0, {num_parts}).", parts=parts)


def _static_rows(element_spec: Any) -> int | None:
    """Returns how many rows every batch has, None where that is known at run time only.

    Raises ValueError or NotImplementedError for batches that cannot be split by rows.
    """
    specs = [spec for spec in tf.nest.flatten(element_spec) if not _is_nothing(spec)]
    for spec in specs:
        if not isinstance(spec, _TENSOR_SPECS):
            raise errors.not_implemented(
                f"`dataset` must yield dense, ragged or sparse tensors; a {type(spec).__name__} has no rows to split.",
                element_spec=element_spec,
                fix="Turn it into tensors with `dataset.map(...)`.",
            )
    if any(spec.shape.rank == 0 for spec in specs):
        raise errors.value_error(
            "`dataset` must yield global batches: axis 0 of each tensor is the batch.",
            element_spec=element_spec,
            fix="Batch it: `dataset.batch(global_batch_size)`.",
        )
    sizes = {spec.shape[0] for spec in specs if spec.shape.rank is not None} - {None}
    if len(sizes) > 1:
        raise errors.value_error(
            f"All tensors of a batch must have the same number of rows, not {sorted(sizes)}.",
            element_spec=element_spec,
            fix="Axis 0 must be the batch in each of them.",
        )
    return sizes.pop() if sizes else None


def _with_cardinality(dataset: tf.data.Dataset, num_batches: tf.Tensor, num_pieces: int) -> tf.data.Dataset:
    """Returns `dataset`, a result of `flat_map`, with its length: `num_pieces` for each of `num_batches` batches."""
    cardinality = tf.get_static_value(num_batches)
    if cardinality is None or cardinality == tf.data.UNKNOWN_CARDINALITY:
        return dataset
    if cardinality != tf.data.INFINITE_CARDINALITY:
        cardinality = cardinality * num_pieces
    return dataset.apply(tf.data.experimental.assert_cardinality(cardinality))


def _is_nothing(spec: Any) -> bool:
    """Whether `spec` is that of a value that is always None, or an `Optional` without one."""
    return isinstance(spec, tf.NoneTensorSpec) or isinstance(spec, tf.OptionalSpec) and spec == tf.OptionalSpec(None)


def _with_nothing(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset` with a `NothingSpec` for each of its None."""
    if not any(map(_is_nothing, tf.nest.flatten(dataset.element_spec))):
        return dataset
    spec = tf.nest.map_structure(lambda spec: NothingSpec() if _is_nothing(spec) else spec, dataset.element_spec)
    same = tf.data.experimental.from_variant(tf.data.experimental.to_variant(dataset), spec)
    return same.with_options(dataset.options())


# What follows runs in the graph that splits a batch.


def _rows(batch: Any) -> tf.Tensor:
    """Returns how many rows `batch` has, after a check that all of its tensors have as many."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    rows, *others = map(_leaf_rows, leaves)
    # The raw op: TensorFlow's function would put each in a branch of its own, which takes longest to trace of all that is here.
    checks = [
        tf.raw_ops.Assert(
            condition=tf.equal(other, rows),
            data=[
                f"All tensors of a batch must have the same number of rows. Tensor {index} ({leaves[index]}) has another "
                f"number than tensor 0 ({leaves[0]}):",
                other,
                rows,
            ],
        )
        for index, other in enumerate(others, start=1)
    ]
    with tf.control_dependencies(checks):
        # Opaque to shape inference: else an uneven piece gets a static size, and the workers' shapes differ.
        return tf.compat.v1.placeholder_with_default(rows, [])


def _leaf_rows(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    if leaf.shape.rank is not None and leaf.shape[0] is not None:
        return tf.constant(leaf.shape[0], tf.int64)
    check = tf.debugging.assert_rank_at_least(leaf, 1, message="The dataset must yield global batches, not scalars.")
    with tf.control_dependencies([check]):
        return tf.shape(leaf, out_type=tf.int64)[0]


def _bounds(rows: tf.Tensor, num_parts: int) -> list[tf.Tensor]:
    """Returns where each piece begins, and the last one ends: `num_parts + 1` tensors of shape (1,), as a slice takes them."""
    part, number = tf.constant([*range(num_parts + 1)], tf.int64), tf.constant(num_parts, tf.int64)
    return tf.split(part * (rows // number) + tf.minimum(part, rows % number), num_parts + 1)


def _piece(leaf: Any, start: tf.Tensor, stop: tf.Tensor, one: tf.Tensor, static_rows: int | None) -> Any:
    """Returns the rows [start, stop) of `leaf`; both bounds have shape (1,), and `static_rows` is None where it is not known."""
    if leaf is None:
        return None
    if isinstance(leaf, tf.SparseTensor):
        return _sparse_piece(leaf, start, stop, static_rows)
    if isinstance(leaf, tf.RaggedTensor):
        piece = leaf[start[0] : stop[0]]
        if static_rows is not None:
            piece.row_splits.set_shape([static_rows + 1])
        return piece
    # The raw op: TensorFlow's function adds four more, and every iterator must make each ready to run.
    piece = tf.raw_ops.StridedSlice(input=leaf, begin=start, end=stop, strides=one)
    piece.set_shape(tf.TensorShape([static_rows]).concatenate(leaf.shape[1:]))
    return piece


def _sparse_piece(leaf: tf.SparseTensor, start: tf.Tensor, stop: tf.Tensor, static_rows: int | None) -> tf.SparseTensor:
    row_shape = leaf.dense_shape[1:]
    piece = tf.sparse.slice(leaf, tf.concat([start, tf.zeros_like(row_shape)], 0), tf.concat([stop - start, row_shape], 0))
    if leaf.shape.rank is None:
        return piece
    # Made again with what is known of the shape: the slice forgets it.
    shape = [static_rows, *leaf.shape[1:]]
    sizes = [piece.dense_shape[axis] if size is None else tf.constant(size, tf.int64) for axis, size in enumerate(shape)]
    return tf.SparseTensor(piece.indices, piece.values, tf.stack(sizes))
