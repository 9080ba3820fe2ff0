"""The graph of a training step of a model whose weights hold no values: forward, loss and the gradients of all weights."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.extensions.tensor.plans.model_inputs import symbolic_calls
from tfdist.tools.planning.equal_layers import LayerCall, calls_noted, units_of


@dataclasses.dataclass(eq=False)
class StepTrace:
    """One trace.

    Attributes:
        graph: the graph.
        batch_size: the examples that it was traced for.
        calls: the calls of the model's layers, in order; the first stands for all before them.
        given: the specs of what the model is given: the arguments of its call.
        targets: the specs of what its loss is given, in the structure of its outputs; None for an output that has no loss.
        forward: how many operations the graph had when forward and the loss were traced.
        gradients: the names of the tensors that are gradients, each with the places of its variables in
            `model.trainable_variables`.
        assumed: sentences on what the model does not say.
    """

    graph: tf.Graph
    batch_size: int
    calls: list[LayerCall]
    given: Any
    targets: Any
    forward: int
    gradients: dict[str, int]
    assumed: tuple[str, ...]


def trace_step(model: keras.Model, batch_size: int, sequence_length: int | None = None) -> StepTrace:
    """Traces a training step of `batch_size` examples.

    The loss is the model's if it is compiled; else cross-entropy of integer labels for outputs with several features, and the
    mean of squares for others.

    Args:
        model: built; its weights need no values.
        batch_size: how many examples.
        sequence_length: the size of axes that the model leaves open, besides the batch.

    Raises:
        ValueError: the model does not say what its inputs are, leaves a size open, or cannot be traced.
    """
    assumed: list[str] = []
    inputs = _inputs(model, batch_size, sequence_length)
    found: list[StepTrace] = []

    def step(x: Any) -> None:
        variables = [variable.value for variable in model.trainable_variables]
        graph = tf.compat.v1.get_default_graph()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for variable in variables:
                tape.watch(variable)
            with calls_noted(units_of(model)) as calls:
                args, kwargs = x
                predicted = model(*args, training=True, **kwargs)
            loss, targets = _loss(model, args, predicted, assumed)
            loss = model.optimizer.scale_loss(loss) if getattr(model, "optimizer", None) is not None else loss
        forward = len(graph.get_operations())
        gradients = tape.gradient(loss, variables)
        dense = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        found.append(
            StepTrace(
                graph=graph,
                batch_size=batch_size,
                calls=calls,
                given=inputs,
                targets=tf.nest.map_structure(lambda x: None if x is None else tf.TensorSpec(x.shape, x.dtype), targets),
                forward=forward,
                gradients={one.name: place for place, one in enumerate(dense) if one is not None},
                assumed=tuple(assumed),
            )
        )

    try:
        tf.function(step, autograph=False).get_concrete_function(inputs)
    except Exception as error:  # whatever a user's model raises
        raise errors.value_error(
            f"`build` returned a model that cannot be traced without data: {type(error).__name__}: {error}",
            fix="Its `call` and its loss must work on tensors of a `tf.function`, and know the sizes of their inputs.",
            model=model.name,
            batch_size=batch_size,
        ) from error
    return found[-1]


def _inputs(model: keras.Model, batch_size: int, sequence_length: int | None) -> Any:
    """Returns the specs of one call of the model."""
    calls = list(symbolic_calls(model))
    if not calls:
        raise errors.value_error(
            "`build` returned a model that does not know the shapes of its inputs.",
            model=model.name,
            fix="Return a functional or Sequential model, or call `model.build(input_shape)` in `build`.",
        )
    known = getattr(model, "inputs", None) or []
    is_open = any(None in tuple(x.shape)[1:] for x in known)
    if is_open and sequence_length is None:
        shapes = [tuple(x.shape) for x in known]
        fix = "Give `sequence_length`, or a model whose inputs have sizes."
        raise errors.value_error("A size of the model's inputs is not known.", inputs=shapes, fix=fix)

    def spec(symbol: Any, other: Any) -> tf.TensorSpec:  # of two calls, which differ in the sizes of axes that are open
        pairs = zip(symbol.shape[1:], other.shape[1:], strict=True)
        sizes = [size if size == another else sequence_length or size for size, another in pairs]
        return tf.TensorSpec((batch_size, *sizes), symbol.dtype)

    return keras.tree.map_structure(spec, calls[0][0], calls[-1][0])


def _loss(model: keras.Model, args: Sequence[Any], predicted: Any, assumed: list[str]) -> tuple[tf.Tensor, Any]:
    """Returns the loss of a step, and its targets, which are made here."""
    if model.compiled and getattr(model, "_compile_loss", None) is not None:
        targets = _targets(model, predicted)
        return model.compute_loss(x=args[0] if args else None, y=targets, y_pred=predicted), targets
    assumed.append("The model is not compiled: its loss counts as cross-entropy of integer labels, or a mean of squares.")
    targets = tf.nest.map_structure(_generic_target, predicted)
    pairs = zip(tf.nest.flatten(targets), tf.nest.flatten(predicted), strict=True)
    losses = [generic_loss(target)(target, output) for target, output in pairs if target is not None]
    if not losses:
        raise errors.value_error("The model has no floating outputs to train.", model=model.name)
    return tf.add_n([tf.cast(one, tf.float32) for one in (*losses, *model.losses)]), targets


def _generic_target(output: tf.Tensor) -> tf.Tensor | None:
    return _target(output, output.shape.rank > 1 and output.shape[-1] > 1) if output.dtype.is_floating else None


def generic_loss(target: Any) -> keras.losses.Loss | None:
    """Returns the loss of a model that is not compiled, by a target, a tensor or its spec; None: it has none."""
    if target is None:
        return None
    is_integer = target.dtype.is_integer
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True) if is_integer else keras.losses.MeanSquaredError()


def _targets(model: keras.Model, predicted: Any) -> Any:
    """Returns what stands for the targets: of the outputs' shapes, or of integers without the last axis for a sparse loss."""
    given = model._compile_loss._user_loss  # noqa: SLF001  tests/tools/planning/test_traced_model.py fails when it changes
    outputs = tf.nest.flatten(predicted)
    names = getattr(model, "output_names", None)
    of_each = [given.get(name) for name in names] if isinstance(given, dict) and names else tf.nest.flatten(given)
    of_each = of_each * len(outputs) if len(of_each) == 1 else of_each
    made = [None if loss is None else _target(output, _is_sparse(loss)) for output, loss in zip(outputs, of_each, strict=False)]
    return tf.nest.pack_sequence_as(predicted, made) if len(made) == len(outputs) else made


def _target(output: tf.Tensor, is_sparse: bool) -> tf.Tensor:
    if is_sparse:
        return tf.compat.v1.placeholder(tf.int32, output.shape[:-1])
    return tf.compat.v1.placeholder(output.dtype, output.shape)


def _is_sparse(loss: Any) -> bool:
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", None) or type(loss).__name__
    return "sparse" in name.lower() or "VocabParallel" in name
