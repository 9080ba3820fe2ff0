"""Where a `Dense` or `Conv2D` is sharded, and the equation of an `EinsumDense` can be.

column    a label of the kernel that is in the output only        "abc,cde->abde": d        output channels
row       a label of the kernel that is summed over               "abcd,cde->abe": c        input channels
"""

import dataclasses

import keras

COLUMN, ROW = "column", "row"


@dataclasses.dataclass(frozen=True)
class ShardedAxes:
    """Where a Dense, EinsumDense or Conv2D is sharded; negative axes count from the end, as the number of leading axes may vary.

    Attributes:
        kernel: the axis of the kernel.
        bias: the axis of the bias, None if the bias stays whole or there is none.
        inputs: the axis on which the input must be local, None if it must be whole.
        outputs: the axis on which the output is local, None if it is whole.
    """

    kernel: int
    bias: int | None
    inputs: int | None
    outputs: int | None


def einsum_terms(layer: keras.layers.EinsumDense) -> tuple[str, str, str]:
    """Returns the equation's three terms; an ellipsis is the one character "." in them."""
    operands, outputs = layer.equation.replace("...", ".").replace(" ", "").split("->")
    inputs, kernel = operands.split(",")
    return inputs, kernel, outputs


def einsum_label(layer: keras.layers.EinsumDense, role: str) -> str | None:
    """Returns the label along which `role`, "column" or "row", shards the layer; None if it cannot."""
    inputs, kernel, outputs = einsum_terms(layer)
    own, other = (outputs, inputs) if role == COLUMN else (inputs, outputs)
    return next((label for label in kernel if label in own and label not in other), None)


def sharded_axes(layer: keras.Layer, role: str) -> ShardedAxes:
    """Returns where a Dense, EinsumDense or Conv2D is sharded in `role`, "column" or "row", in which it can be."""
    if not isinstance(layer, keras.layers.EinsumDense):
        outputs = 1 if isinstance(layer, keras.layers.Dense) else 3  # kernel (in, out) or (height, width, in, out)
        features = 1 if getattr(layer, "data_format", None) == "channels_first" else -1
        if role == COLUMN:
            return ShardedAxes(kernel=outputs, bias=None if layer.bias is None else 0, inputs=None, outputs=features)
        return ShardedAxes(kernel=outputs - 1, bias=None, inputs=features, outputs=None)
    input_term, kernel, output_term = einsum_terms(layer)
    label = einsum_label(layer, role)
    if role == ROW:
        return ShardedAxes(kernel.index(label), bias=None, inputs=_axis(input_term, label), outputs=None)
    bias = None
    if layer.bias_axes and label in layer.bias_axes:
        # The bias begins at the first axis that has one.
        bias = output_term.index(label) - min(output_term.index(axis) for axis in layer.bias_axes)
    return ShardedAxes(kernel.index(label), bias=bias, inputs=None, outputs=_axis(output_term, label))


def _axis(term: str, label: str) -> int:
    """Returns the label's axis in the term: from the end where an ellipsis stands before it."""
    index = term.index(label)
    return index - len(term) if "." in term[:index] else index
