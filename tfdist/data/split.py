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

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.data.dealing import Dealing, may_differ
from tfdist.data.kept_functions import flat_map
from tfdist.data.parts import times_as_long

_TENSOR_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


def split_batches(dataset: tf.data.Dataset, num_parts: int, parts: Sequence[int]) -> tf.data.Dataset:
    """Splits each global batch in `num_parts` pieces along axis 0 and yields the pieces `parts` of it, one element a piece.

    With `n = q * num_parts + r` rows in a batch, piece `p` holds the rows

        [p * q + min(p, r),  (p + 1) * q + min(p + 1, r))          the pieces of `numpy.array_split`

    so sizes differ by at most one, larger pieces come first, and pieces are empty where `n < num_parts`.

    Tensors of one batch may differ in their rows: their greatest common divisor is dealt so (`dealing`).

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
        ValueError: `num_parts` or `parts` are out of range, or an element of `dataset` holds a scalar.
        NotImplementedError: an element holds something else than tensors, such as an `Optional` of tensors or a dataset.
        tf.errors.InvalidArgumentError: while iterating, when a tensor whose rows are not known beforehand has another number of
            them than one whose rows are known.
    """
    parts = tuple(parts)
    if not isinstance(dataset, tf.data.Dataset):
        raise errors.value_error("`dataset` must be a `tf.data.Dataset`.", dataset=dataset)
    errors.check_integer("num_parts", num_parts, least=1)
    if not parts or not all(isinstance(part, int) and 0 <= part < num_parts for part in parts):
        raise errors.value_error(f"`parts` must name at least one piece, each an integer in [0, {num_parts}).", parts=parts)
    element_spec = dataset.element_spec  # the functions below may be kept, the dataset must not be
    rows = _static_rows(element_spec)
    differs = None in rows and len(rows) > 1 and may_differ(dataset)
    dealing = Dealing(num_parts, rows, differs)

    def pieces(*batch: Any) -> list[Any]:
        if type(element_spec) is not tuple:  # a tuple, and nothing else, comes as several arguments
            (batch,) = batch
        # What Keras would turn into None itself, if it were no value of several devices.
        batch = tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)
        tensors = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
        bounds, one = dealing.bounds(tensors), tf.constant([1], tf.int64)

        def piece(part: int) -> Any:
            cut = [
                _piece(tensor, of_each[part], of_each[part + 1], one, rows)
                for tensor, of_each, rows in zip(tensors, bounds, dealing.piece_rows, strict=True)
            ]
            remaining = iter(cut)
            return tf.nest.map_structure(lambda leaf: None if leaf is None else next(remaining), batch)

        return [piece(part) for part in parts]

    def all_pieces(*batch: Any) -> tf.data.Dataset:
        # Cheaper than a dataset of part indices, which runs one more function per piece.
        elements = map(tf.data.Dataset.from_tensors, pieces(*batch))
        return functools.reduce(tf.data.Dataset.concatenate, elements)

    if num_parts == len(parts) == 1 and not any(isinstance(spec, tf.OptionalSpec) for spec in tf.nest.flatten(element_spec)):
        return dataset
    return times_as_long(flat_map(dataset, all_pieces, (num_parts, parts, differs)), dataset, len(parts))


def _static_rows(element_spec: Any) -> list[int | None]:
    """Returns how many rows each tensor of every batch has, None where that is known at run time only.

    Raises ValueError or NotImplementedError for batches that cannot be split by rows.
    """
    # What is always None has no rows, nor has an `Optional` without a value.
    specs = [spec for spec in tf.nest.flatten(element_spec) if spec not in (tf.NoneTensorSpec(), tf.OptionalSpec(None))]
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
    return [None if spec.shape.rank is None else spec.shape[0] for spec in specs]


# What follows runs in the graph that splits a batch.


def _piece(leaf: Any, start: tf.Tensor, stop: tf.Tensor, one: tf.Tensor, static_rows: int | None) -> Any:
    """Returns the rows [start, stop) of `leaf`; both bounds have shape (1,), and `static_rows` is None where it is not known."""
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
