"""Traces of what Keras has: each layer, activation, loss, metric and optimizer, forward and backward, on a batch of any size."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.programs.losses import test_every_loss as of_losses
from tests.programs.metrics import test_every_metric as of_metrics
from tests.programs.models import test_every_layer as of_layers
from tfdist.placements.graph_facts import GraphFacts
from tfdist.placements.kinds import Replicate, Shard

IMAGE, SERIES, VECTOR = of_layers.IMAGE, of_layers.SERIES, of_layers.VECTOR

# Layers without weights, or that draw, which the table of tests/programs lacks.
MORE_LAYERS = [
    *((name, {"rate": 0.3}, SERIES) for name in ("Dropout", "AlphaDropout", "GaussianDropout", "SpatialDropout1D")),
    ("GaussianNoise", {"stddev": 0.3}, SERIES),
    ("SpatialDropout2D", {"rate": 0.3}, IMAGE),
    ("SpatialDropout3D", {"rate": 0.3}, (2, 3, 4, 2)),
    ("Activation", {"activation": "gelu"}, SERIES),
    ("Cropping1D", {"cropping": 1}, SERIES),
    ("Cropping3D", {"cropping": 1}, (4, 4, 4, 2)),
    ("UpSampling1D", {"size": 2}, SERIES),
    ("UpSampling3D", {"size": 2}, (2, 3, 4, 2)),
    ("ZeroPadding1D", {"padding": 1}, SERIES),
    ("ZeroPadding3D", {"padding": 1}, (2, 3, 4, 2)),
    ("ReLU", {}, SERIES),
    ("Identity", {}, SERIES),
    ("BatchNormalization", {}, IMAGE),
    ("UpSampling2D", {"size": 2, "interpolation": "bilinear"}, IMAGE),
]
# Activations that are no functions of tensors alone.
NOT_CALLED = {"get", "serialize", "deserialize", "threshold"}


class Facts(GraphFacts):
    """The placements in a traced function whose arguments are rows."""

    def __init__(self, graph: tf.Graph):
        super().__init__()
        self._arguments = {x.name: Shard(0, (x.name,)) for x in graph.inputs if x.dtype not in (tf.resource, tf.variant)}
        self._arguments.update({inner.name: Replicate() for _, inner in graph.captures})

    def _leaf(self, tensor: tf.Tensor):
        return self._arguments.get(tensor.name)


def traced(function, *shapes, rows=None, dtypes=None):
    """Returns the graph of `function` of tensors that have `rows` rows of `shapes`."""
    dtypes = dtypes or ["float32"] * len(shapes)
    specs = [tf.TensorSpec((rows, *shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return tf.function(function, autograph=False).get_concrete_function(*specs).graph


def with_gradients(function, variables=()):
    """Returns a function that returns what `function` does, and all gradients of the sum of its squares."""

    def step(*inputs):
        with tf.GradientTape() as tape:
            sources = [*(x for x in inputs if x.dtype.is_floating), *variables]
            tape.watch(sources)
            results = tf.nest.flatten(function(*inputs))
            loss = sum(tf.reduce_sum(tf.square(x)) for x in results if x.dtype.is_floating)
        gradients = tape.gradient(loss, sources) if tf.is_tensor(loss) else []
        return results, [tf.convert_to_tensor(x) for x in gradients if x is not None]

    return step


def of_layer(case, *, rows=None, gradients=True, training=True):
    """Returns the graph of the model of a case of tests/programs."""
    model = case.build()
    variables = [v.value for v in model.trainable_variables]

    def call(*inputs):
        return model(list(inputs) if len(inputs) > 1 else inputs[0], training=training)

    shapes, dtypes = zip(*((x.shape[1:], x.dtype) for x in model.inputs), strict=True)
    return traced(with_gradients(call, variables) if gradients else call, *shapes, rows=rows, dtypes=list(dtypes))


def layer_cases():
    """Returns the cases of tests/programs, and some more layers."""
    return {case.name: case for case in of_layers.CASES} | {
        name + (" " * (name in {c.name for c in of_layers.CASES})): of_layers.one(name, shape, **arguments)
        for name, arguments, shape in MORE_LAYERS
    }


def activations():
    """Returns the activations of Keras by name."""
    return {
        name: function
        for name, function in vars(keras.activations).items()
        if callable(function) and not name.startswith("_") and name not in NOT_CALLED and not isinstance(function, type)
    }


def losses():
    """Returns losses of each kind, each with its predictions' activation and the shape of a row of its targets."""
    found = {}
    for name, targets, activation, arguments in of_losses.KINDS:
        row = () if targets is of_losses.labels else (of_losses.CLASSES,)
        for reduction in (None, "sum_over_batch_size"):
            loss = getattr(keras.losses, name)(reduction=reduction, **arguments)
            found[f"{name} {reduction}"] = loss, activation or "linear", row
    for reduction in ("sum", "mean_with_sample_weight"):
        found[f"MeanSquaredError {reduction}"] = keras.losses.MeanSquaredError(reduction), "linear", (of_losses.CLASSES,)
    for name in ("Dice", "Tversky"):
        found[name] = getattr(keras.losses, name)(reduction=None), "sigmoid", (of_losses.CLASSES,)
    return found | {"Circle": (keras.losses.Circle(reduction=None), "linear", ())}


def of_loss(loss, activation, target, *, weighted=True, rows=None):
    """Returns the graph of a loss of rows."""

    def call(y, x, weights):
        return loss(y, keras.activations.get(activation)(x), weights if weighted else None)

    step = with_gradients(call)
    return traced(
        step, target, (of_losses.CLASSES,), (), rows=rows, dtypes=["int32" if target == () else "float32", *["float32"] * 2]
    )


def of_metric(metric, predictions: np.ndarray, targets: np.ndarray, *, weighted=True, rows=None):
    """Returns the graph of an update of a metric, and of its result."""
    metric.build(predictions.shape, targets.shape) if hasattr(
        metric, "build"
    ) and metric.__class__.__name__ == "R2Score" else None

    def call(y, x, weights):
        metric.update_state(y, x, weights if weighted else None)
        return metric.result()

    shapes = targets.shape[1:], predictions.shape[1:], ()
    return traced(call, *shapes, rows=rows, dtypes=[targets.dtype, predictions.dtype, "float32"])


def metrics():
    """Returns metrics of each kind, with predictions and targets that they take."""
    for predictions, targets, kinds in of_metrics.KINDS.values():
        made = [getattr(keras.metrics, kind)(**arguments) for kind, arguments in (kinds or {}).items()]
        yield from ((metric, predictions, targets) for metric in (made if kinds else of_metrics.settings()))


def optimizers():
    """Returns optimizers of each kind, with clipping and averages."""
    kinds = [kind for kind in vars(keras.optimizers).values() if isinstance(kind, type)]
    own = {"clipnorm": 1.0, "use_ema": True, "ema_overwrite_frequency": 3}
    others = {"LossScaleOptimizer", "MultiOptimizer", "Optimizer", "OptimizerMap"}
    found = [kind(learning_rate=0.1, **own) for kind in dict.fromkeys(kinds) if kind.__name__ not in others]
    return [*found, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(global_clipnorm=1.0))]


def of_optimizer(optimizer):
    """Returns the graph of a step of an optimizer."""
    made = [layers.Dense(3), layers.Embedding(5, 3)]
    for layer, shape in zip(made, [(None, 4), (None,)], strict=True):
        layer.build(shape)
    weights = [v for layer in made for v in layer.trainable_variables]
    optimizer.build(weights)

    def call(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(made[0](x)) + tf.reduce_mean(made[1](tf.cast(x[:, 0], "int32")))
        optimizer.apply(tape.gradient(loss, [v.value for v in weights]), weights)
        return loss

    return traced(call, (4,))


def operations_of(graph):
    """Returns the operations of a traced function and of the functions in it."""
    waiting, seen, found = [graph], set(), []
    for one in waiting:
        for op in one.get_operations():
            found.append(op)
            for attribute in op.op_def.attr:
                names = []
                if attribute.type == "func":
                    names = [op.get_attr(attribute.name).name]
                elif attribute.type == "list(func)":
                    names = [x.name for x in op.get_attr(attribute.name)]
                for name in names:
                    inner = one._get_function(name)
                    if name not in seen and inner is not None and inner.graph is not None:
                        seen.add(name)
                        waiting.append(inner.graph)
    return found
