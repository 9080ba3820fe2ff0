"""Whether a tensor has some of a batch's rows, as many as satisfy a condition: a mean over those is no mean over the batch.

tf.reduce_mean(tf.boolean_mask(losses, mask))     over two rows on one rank, over none on another
tf.gather_nd(losses, tf.where(mask))              the same
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives.results import Results

_PASSING = frozenset("Cast ExpandDims Identity Reshape Squeeze StridedSlice".split())
_SCATTERING = frozenset("TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate".split())
_COUNTED = frozenset("ScatterNd SegmentMean SegmentSum UnsortedSegmentSum".split())  # into as many rows as the program says


def has_selected_rows(tensor: tf.Tensor, results: Results) -> bool:
    """Whether the first axis of `tensor` has the rows of a batch that a condition has chosen."""
    waiting, seen = [tensor], {tensor.name}
    for x in waiting:
        op = x.op
        if results.is_of_all(x):
            continue
        if op.type == "DynamicPartition" or op.type in ("GatherV2", "GatherNd") and _is_where(op.inputs[1]):
            return True
        if op.type in _COUNTED:
            continue
        inputs = op.inputs[:1] if op.type in _SCATTERING else results.inputs_of(x)
        for source in inputs:
            has_rows = source.shape.rank is None or source.shape.rank > 0 and source.shape[0] is None
            if has_rows and source.name not in seen:
                seen.add(source.name)
                waiting.append(source)
    return False


def _is_where(indices: tf.Tensor) -> bool:
    while indices.op.type in _PASSING:
        indices = indices.op.inputs[0]
    return indices.op.type == "Where"
