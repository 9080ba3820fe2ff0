"""What TensorFlow's kernels do with buffers and processors, by what the table of operations says of them."""

from tfdist.placements.rules import batches, gathers, joins, pointwise, products, views
from tfdist.placements.table import Kind, row_of

CROSSENTROPIES = ("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
_MOVING = (Kind.GATHER, Kind.JOIN, Kind.SIZE, Kind.VIEW)
_COPYING = (batches.from_blocks, batches.to_blocks, pointwise.alike, pointwise.cast)
_PASSING = (joins.list_with, pointwise.same, views.expand_dims, views.reshape, views.squeeze)
# What a processor computes by a series, or by several rounds: an element takes longer than to move it.
SERIES = """
Acos Asin Atan Cos Elu Erf Erfc Exp Expm1 Log Log1p LogSoftmax Pow Selu Sigmoid Sin SoftmaxCrossEntropyWithLogits Softmax Softplus
SparseSoftmaxCrossEntropyWithLogits StatelessRandomNormalV2 StatelessRandomUniformV2 StatelessTruncatedNormalV2 Tan Tanh
""".split()


def adds_up(kind: str) -> bool:
    """Whether such an operation returns the sum of its inputs, or its input."""
    return row_of(kind).rule in (pointwise.add, pointwise.same)


def looks_up(kind: str) -> bool:
    """Whether such an operation reads rows of a table, and not all of it."""
    return row_of(kind).rule is gathers.gather


def only_moves(kind: str) -> bool:
    """Whether such an operation computes no number: it moves some, or says how many there are."""
    row = row_of(kind)
    return passes_its_buffer_on(kind) or row.kind in _MOVING or row.rule in _COPYING


def passes_its_buffer_on(kind: str) -> bool:
    """Whether what such an operation returns is the buffer of its first input."""
    return kind in ("Bitcast", "PlaceholderWithDefault", "TensorListResize") or row_of(kind).rule in _PASSING


def may_overwrite(kind: str) -> bool:
    """Whether such an operation writes each element after it has read that of the input, and so may write into a dying one."""
    row = row_of(kind)
    is_pointwise = row.kind is Kind.POINTWISE and row.rule is not pointwise.select
    return is_pointwise or row.rule in (batches.along_last, products.bias_add)
