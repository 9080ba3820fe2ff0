"""What `Einsum` moves besides what it reads and writes: it multiplies matrices, and transposes what does not lie as they do.

A product of two terms is one of batches of matrices. A term lies as they do if the labels that all have come first, then those
that it alone has and those that are summed over, in either order: "abc" times "cde" needs nothing, in "aecd" times "abcd" to
"acbe" both terms are transposed.
Source: TensorFlow's `einsum_op_impl.h`, `ReduceOperand`.
"""

import itertools

import tensorflow as tf

from tfdist.planning import operations


def transposed_bytes(operation: tf.Operation) -> float:
    """Returns the bytes that an `Einsum` reads and writes to transpose its operands and its result; 0 of other operations."""
    if operation.type != "Einsum" or len(operation.inputs) != 2:
        return 0.0
    given, _, result = operation.get_attr("equation").decode().replace("...", "").partition("->")
    one, other = given.split(",")
    batch = [label for label in result if label in one and label in other]
    summed = set(one) & set(other) - set(result)
    product = [*batch, *(x for x in one + other if x not in batch and x not in summed)]
    tensors = [x for term, x in zip((one, other), operation.inputs, strict=True) if not _is_in_order(term, batch, summed)]
    if list(result) != product:
        tensors.append(operation.outputs[0])
    return 2.0 * sum(operations.tensor_bytes(x) or 0 for x in tensors)


def _is_in_order(term: str, batch: list[str], summed: set[str]) -> bool:
    """Whether a term's labels are those of the batch, then its own and the summed ones, each together."""
    if list(term[: len(batch)]) != batch:
        return False
    kinds = [label in summed for label in term[len(batch) :]]
    return sum(one != other for one, other in itertools.pairwise(kinds)) <= 1
