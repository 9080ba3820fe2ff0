"""Costs of a model's layers: floating-point operations, bytes of weights and of outputs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.extensions.pipeline.stages.flops import UNKNOWN_SIZE, elements, flops_of
from tfdist.extensions.pipeline.stages.stage import nodes_in_order, run_node
from tfdist.graphs import tape
from tfdist.sharding import keras_scope


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one call of a layer or operation.

    Attributes:
        name: the name of the layer or operation.
        flops: floating-point operations of the forward pass, for one example.
        weight_bytes: bytes of the layer's weights that no earlier call uses, so that a weight counts once.
        activation_bytes: bytes of the outputs, for one example.
    """

    name: str
    flops: int
    weight_bytes: int
    activation_bytes: int


def node_costs(module: keras.Model) -> list[Cost]:
    """Returns the cost of every node of a functional model, in the order of computation.

    The model is traced once, in inference, and the graph of each node counted as `pipeline.stages.flops` says. Weights stand in
    that graph as symbols: no weight is read, and a weight that is put off until its stage is known is not made.

    An axis of unknown size of the inputs, other than the batch, counts as `UNKNOWN_SIZE` (128), as a sequence of medium length.
    An operation that cannot be traced, with such a size for instance, is warned of, and costs 2 FLOPs for each weight and
    position (element of the output, without its last axis).

    Args:
        module: a functional model; for a Sequential, pass its `_functional`.

    Returns:
        One cost for each of `nodes_in_order(module)`.
    """
    batch_size = next((x.shape[0] for x in module.inputs if len(x.shape) and x.shape[0]), 1)  # None: batches of any size
    counted: set[int] = set()
    costs = []
    for node, (flops, outputs) in zip(nodes_in_order(module), _traced(module, batch_size), strict=True):
        weights = {id(weight): weight for weight in getattr(node.operation, "weights", ()) if id(weight) not in counted}
        counted.update(weights)
        costs.append(
            Cost(
                name=node.operation.name,
                flops=flops // batch_size,
                weight_bytes=sum(map(bytes_of, weights.values())),
                activation_bytes=sum(map(bytes_of, _tensors(outputs))) // batch_size,
            )
        )
    return costs


def bytes_of(x: Any) -> int:
    """Returns the bytes of a tensor, or of the whole of a variable, which need not be made yet."""
    return elements(x.shape) * tf.as_dtype(x.dtype).size


def bytes_per_example(tensors: Sequence[keras.KerasTensor]) -> int:
    """Returns the bytes of one example of symbolic tensors of a model, whose first axis is the batch."""
    return sum(elements(x.shape[1:]) * tf.as_dtype(x.dtype).size for x in tensors)


def _traced(module: keras.Model, batch_size: int) -> list[tuple[int, list[Any]]]:
    """Traces a functional model and returns the FLOPs of every node and its outputs in the graph."""
    variables = module.variables
    traced = []

    def run(inputs: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]) -> None:
        values = dict(zip(map(id, module.inputs), inputs, strict=True))
        mapping = list(zip(variables, weights, strict=True))
        with keras_scope.SymbolicScope(), keras.StatelessScope(state_mapping=mapping):
            for node in nodes_in_order(module):
                before = tape.operations_so_far()
                try:
                    outputs = run_node(node, values, training=False)
                    flops = flops_of(_tensors(outputs), tape.operations_since(before))
                except Exception as error:  # whatever a layer raises that is called on symbols
                    specs = [_spec(x, batch_size) for x in node.outputs]
                    outputs = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
                    flops = _guessed(node.operation, outputs, error)
                values.update(zip(map(id, node.outputs), outputs, strict=True))
                traced.append((flops, outputs))

    tf.function(run, autograph=False).get_concrete_function(
        [_spec(x, batch_size) for x in module.inputs],
        [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables],
    )
    return traced


def _spec(x: Any, batch_size: int) -> tf.TensorSpec:
    """Returns the spec of `x`, a tensor of Keras or TensorFlow, with a number for every size that is not known."""
    unknown = [batch_size] + [UNKNOWN_SIZE] * len(x.shape)
    return tf.TensorSpec([other if size is None else size for size, other in zip(x.shape, unknown, strict=False)], x.dtype)


def _tensors(outputs: Sequence[Any]) -> list[Any]:
    """Returns the dense tensors that outputs consist of; a sparse output consists of several."""
    return [x for x in tf.nest.flatten(outputs, expand_composites=True) if tf.is_tensor(x)]


def _guessed(operation: keras.Operation, outputs: Sequence[tf.Tensor], error: Exception) -> int:
    """Warns of an operation that cannot be traced, and returns its FLOPs: 2 for each weight and position."""
    errors.warn(
        f"The cost of {operation.name!r} is guessed from its weights: it could not be traced by itself ({type(error).__name__}).",
        fix="Where stages do not cost alike, cut the model yourself (`stages`).",
    )
    positions = elements(outputs[0].shape[:-1]) if outputs and outputs[0].shape.rank else 1
    return 2 * sum(elements(weight.shape) for weight in getattr(operation, "weights", ())) * positions
