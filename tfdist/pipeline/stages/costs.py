"""What the layers of a model cost: floating-point operations, bytes of weights and of outputs, counted; and measured seconds."""

from __future__ import annotations

import dataclasses
import statistics
import timeit
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.graphs import tape
from tfdist.pipeline.stages.flops import UNKNOWN_SIZE, elements, flops_of
from tfdist.pipeline.stages.stage import nodes_in_order, run_node
from tfdist.sharding import keras_scope

_MEASURED_EXAMPLES, _MEASURED_RUNS = 8, 5


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one call of a layer or operation costs.

    Attributes:
        name: the name of the layer or operation.
        flops: floating-point operations of the forward pass, for one example.
        weight_bytes: bytes of the layer's weights that no earlier call uses, so that a weight counts once.
        activation_bytes: bytes of the outputs, for one example.
        seconds: seconds of a measured forward and backward pass, for one example; None: not measured.
    """

    name: str
    flops: int
    weight_bytes: int
    activation_bytes: int
    seconds: float | None = None


def node_costs(module: keras.Model, *, measured: bool = False) -> list[Cost]:
    """Returns the cost of every node of a functional model, in the order of computation.

    The model is traced once, in inference, and the graph of each node counted as `pipeline.stages.flops` says. Weights stand in
    that graph as symbols: no weight is read, and a weight that is put off until its stage is known is not made.

    An axis of unknown size of the inputs, other than the batch, counts as `UNKNOWN_SIZE` (128), as a sequence of medium length.
    An operation that cannot be traced, with such a size for instance, is warned of, and costs 2 FLOPs for each weight and
    position (element of the output, without its last axis).

    Time, unlike FLOPs, differs from one measurement and machine to the next, but all workers of a pipeline must split a model
    alike. So measure once, in a program of its own, and write the names down:

        costs = node_costs(model, measured=True)
        stages = [costs[place].name for place in balanced_split_points([cost.seconds for cost in costs], num_stages)]

    Args:
        module: a functional model; for a Sequential, pass its `_functional`.
        measured: whether every node runs by itself, on random inputs without masks, so that its time is measured.

    Returns:
        One cost for each of `nodes_in_order(module)`.

    Raises:
        RuntimeError: `measured`, and a node cannot be run by itself.
    """
    made_for = (x.shape[0] for x in module.inputs if len(x.shape) and x.shape[0])  # None: batches of any size
    batch_size = next(made_for, _MEASURED_EXAMPLES if measured else 1)
    known = {id(x): x for x in module.inputs}
    counted: set[int] = set()
    costs = []
    for node, (flops, outputs) in zip(nodes_in_order(module), _traced(module, batch_size), strict=True):
        weights = {id(weight): weight for weight in getattr(node.operation, "weights", ()) if id(weight) not in counted}
        counted.update(weights)
        known.update(zip(map(id, node.outputs), outputs, strict=True))
        seconds = None
        if measured:
            inputs = [_spec(known[id(x)], batch_size) for x in node.input_tensors]
            seconds = _measured_seconds(node, inputs) / batch_size
        costs.append(
            Cost(
                name=node.operation.name,
                flops=flops // batch_size,
                weight_bytes=sum(map(variable_bytes, weights.values())),
                activation_bytes=sum(_bytes(x.shape, x.dtype) for x in _tensors(outputs)) // batch_size,
                seconds=seconds,
            )
        )
    return costs


def variable_bytes(variable: keras.Variable) -> int:
    """Returns the bytes of the whole of a variable, which need not be made yet."""
    return _bytes(variable.shape, variable.dtype)


def bytes_per_example(tensors: Sequence[keras.KerasTensor]) -> int:
    """Returns the bytes of one example of symbolic tensors of a model, whose first axis is the batch."""
    return sum(_bytes(x.shape[1:], x.dtype) for x in tensors)


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


def _measured_seconds(node: Any, inputs: Sequence[tf.TensorSpec]) -> float:
    """Returns the seconds of a forward and backward pass of a node, the median of some runs, on the default device.

    The node runs on inputs and weights made for it: random numbers where they are floating, and zeros, which are indices of any
    table, where they are integers.

    Raises:
        RuntimeError: the node cannot be run by itself.
    """
    variables = list(getattr(node.operation, "variables", ()))

    @tf.function(autograph=False)
    def step(inputs: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]) -> tf.Tensor:
        values = dict(zip(map(id, node.input_tensors), inputs, strict=True))
        sources = [x for x in (*inputs, *weights) if x.dtype.is_floating]
        with tf.GradientTape() as recorder:
            recorder.watch(sources)
            with keras.StatelessScope(state_mapping=list(zip(variables, weights, strict=True))):
                outputs = run_node(node, values, training=True)
            total = _sum(outputs)
        return total + _sum(recorder.gradient(total, sources))  # all are summed: TensorFlow leaves out what nobody wants

    try:
        given = [_random(x.shape, x.dtype) for x in inputs], [_random(v.shape, v.dtype) for v in variables]
        step(*given)
        seconds = timeit.repeat(lambda: step(*given).numpy(), number=1, repeat=_MEASURED_RUNS)  # `numpy` waits for the device
    except Exception as error:  # whatever a layer raises that is called by itself
        raise errors.runtime_error(
            f"{node.operation.name!r} cannot be run by itself, on random inputs, so that its time could be measured.",
            fix="Count FLOPs instead: `measured=False`.",
        ) from error
    return statistics.median(seconds)


def _sum(tensors: Sequence[Any]) -> tf.Tensor:
    """Returns the sum over all elements of tensors; None counts as nothing, and a table's gradient as its rows."""
    dense = [getattr(x, "values", x) for x in tensors if x is not None]
    return tf.add_n([tf.zeros(()), *(tf.reduce_sum(tf.cast(x, tf.float32)) for x in dense)])


def _random(shape: Any, dtype: Any) -> tf.Tensor:
    dtype = tf.as_dtype(dtype)
    return tf.cast(tf.random.normal(shape, stddev=0.1), dtype) if dtype.is_floating else tf.zeros(shape, dtype)


def _guessed(operation: keras.Operation, outputs: Sequence[tf.Tensor], error: Exception) -> int:
    """Warns of an operation that cannot be traced, and returns its FLOPs: 2 for each weight and position."""
    warnings.warn(
        errors.message(
            f"The cost of {operation.name!r} is guessed from its weights: it could not be traced by itself "
            f"({type(error).__name__}).",
            fix="Where stages do not cost alike, cut the model yourself (`stages`).",
        ),
        stacklevel=2,
    )
    positions = elements(outputs[0].shape[:-1]) if outputs and outputs[0].shape.rank else 1
    return 2 * sum(elements(weight.shape) for weight in getattr(operation, "weights", ())) * positions


def _bytes(shape: Any, dtype: Any) -> int:
    return elements(shape) * tf.as_dtype(dtype).size
