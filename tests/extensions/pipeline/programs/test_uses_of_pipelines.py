"""What users do with a model that is wrapped in a pipeline, and what they wrap, beside the plain model on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from ranks import strategy_on
from training import one_device

import tfdist
from tests.parity.comparison import assert_same_tree, state
from tests.programs.comparing import run
from tests.programs.metrics.test_every_metric import Batches, Largest, f1_of_a_batch

pytestmark = [pytest.mark.as_traced, pytest.mark.usefixtures("float64")]

layers, ops = keras.layers, keras.ops
_rng = np.random.default_rng(0)
X, Y = _rng.normal(size=(44, 6)), _rng.integers(0, 3, 44)


def graph():
    features = keras.Input((6,))
    x = layers.Dense(8, "tanh", name="a")(features)
    x = layers.Dense(8, "tanh", name="b")(x)
    return keras.Model(features, layers.Dense(3, name="d")(layers.Dense(8, "tanh", name="c")(x)))


def compiled(strategy, build, wraps, optimizer=lambda: keras.optimizers.SGD(0.1), **settings):
    with strategy.scope():
        model = build()
        if wraps:
            model = tfdist.PipelineModel(model, num_microbatches=2)
        elif isinstance(model, list):
            model = keras.Sequential(model)
        model.compile(optimizer(), **{"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), **settings})
    return model


def fit(model, y=Y, **arguments):
    return model.fit(X, y, **{"batch_size": 8, "shuffle": False, "verbose": 0, **arguments}).history


def steps_per_execution(strategy, wraps):
    model = compiled(strategy, graph, wraps, keras.optimizers.Adam, steps_per_execution=2)
    return fit(model, epochs=2), state(model)


def batch_by_batch(strategy, wraps):
    model = compiled(strategy, graph, wraps, metrics=["accuracy"])
    logs = [model.train_on_batch(X[:8], Y[:8]), model.train_on_batch(X[8:15], Y[8:15]), model.test_on_batch(X[:7], Y[:7])]
    return [[float(value) for value in log] for log in logs], model.predict_on_batch(X[:5]), state(model)


def weights_of_classes(strategy, wraps):
    model = compiled(strategy, graph, wraps, weighted_metrics=["accuracy"])
    return fit(model, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, validation_split=0.25), state(model)


def frozen_and_thawed(strategy, wraps):
    model = compiled(strategy, graph, wraps)
    found = [fit(model)]
    for trains in (False, True):
        model.get_layer("a").trainable = model.get_layer("b").trainable = trains
        with strategy.scope():
            model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        found.append(fit(model))
    return found, model.get_weights()


def low_rank_factors_afterwards(strategy, wraps):
    """Layers make more variables when the model is in stages already."""
    model = compiled(strategy, graph, wraps)
    with strategy.scope():
        for name in "bc":
            model.get_layer(name).enable_lora(2)
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fit(model), fit(model), model.get_weights()


def low_rank_factors_before(strategy, wraps):
    """Kernels are frozen before anybody knows where they are stored."""

    def build():
        model = graph()
        for name in "bc":
            model.get_layer(name).enable_lora(2)
        return model

    model = compiled(strategy, build, wraps)
    return fit(model), fit(model), model.get_weights()


def not_built(strategy, wraps):
    model = compiled(strategy, lambda: [layers.Dense(8, "tanh"), layers.Dense(8, "tanh"), layers.Dense(3)], wraps)
    return fit(model), model.get_weights()


def model_in_a_model(strategy, wraps):
    """A model that is a layer, called twice."""

    def build():
        features, encoder = keras.Input((6,)), graph()
        both = layers.Concatenate()([encoder(features), encoder(features * 2.0)])
        return keras.Model(features, layers.Dense(3)(both))

    model = compiled(strategy, build, wraps)
    return fit(model), state(model)


def endless_data_and_callbacks(strategy, wraps):
    model = compiled(strategy, graph, wraps, keras.optimizers.Adam)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat()
    callbacks = [keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0), keras.callbacks.EarlyStopping(monitor="loss")]
    history = model.fit(dataset, steps_per_epoch=4, epochs=3, verbose=0, callbacks=callbacks).history
    return history["loss"], state(model)


def accumulation_and_clipping(strategy, wraps):
    optimizer = lambda: keras.optimizers.Adam(gradient_accumulation_steps=2, clipnorm=0.1)  # noqa: E731
    model = compiled(strategy, graph, wraps, optimizer)
    return fit(model, epochs=2), model.get_weights()


def several_outputs_and_a_loss_for_one(strategy, wraps):
    def build():
        features = keras.Input((6,))
        x = layers.Dense(8, "tanh")(features)
        return keras.Model(features, [layers.Dense(3, name="class")(x), layers.Dense(1, name="size")(layers.Dense(4)(x))])

    losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), None]
    model = compiled(strategy, build, wraps, loss=losses, metrics=[["accuracy"], ["mae"]])
    return fit(model, y=[Y, Y[:, None]]), model.predict(X[:3], verbose=0), model.get_weights()


class Penalized(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        return x


def losses_of_layers_alone(strategy, wraps):
    model = compiled(strategy, lambda: [keras.Input((6,)), layers.Dense(8), Penalized(), layers.Dense(4)], wraps, loss=None)
    return fit(model, y=None), model.get_weights()


def metrics_that_are_no_means(strategy, wraps):
    def build():
        return [keras.Input((6,)), layers.Dense(5), layers.Dense(1, "sigmoid")]

    metrics = ["AUC", keras.metrics.F1Score(threshold=0.5), "mae"]
    model = compiled(strategy, build, wraps, loss="binary_crossentropy", metrics=metrics)
    history = fit(model, y=(Y[:, None] > 0).astype("float64"), batch_size=9, epochs=2)
    return {name: np.ravel(values) for name, values in history.items()}, state(model)


def metrics_that_are_no_sums(strategy, wraps):
    """Of whole batches: maxima, numbers of a batch, batches that are counted; the last one has 1 row."""

    def build():
        return [keras.Input((6,)), layers.Dense(5), layers.Dense(1, "sigmoid")]

    model = compiled(strategy, build, wraps, loss="binary_crossentropy", metrics=[Largest(), Batches(), f1_of_a_batch, "mae"])
    targets, weights = (Y[:, None] > 0).astype("float64"), np.linspace(0.5, 2, 44)
    history = fit(model, y=targets, sample_weight=weights, batch_size=43, epochs=2)
    evaluated = model.evaluate(X[:20], targets[:20], batch_size=7, verbose=0, return_dict=True)
    return history, evaluated, [np.asarray(value) for value in model.metrics_variables], state(model)


KEPT = {}  # a model that is built takes no more attributes that have variables


class OwnMetrics(tfdist.PipelineModel):
    """What `compute_metrics` of one's own computes is of the batch."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        KEPT["iou"].update_state(y, ops.argmax(y_pred, axis=-1))
        KEPT["spread"].update_state(ops.mean(y_pred))
        return keras.Model.compute_metrics(self, x, y, y_pred, sample_weight)


class PlainMetrics(keras.Model):
    compute_metrics = OwnMetrics.compute_metrics


def metrics_of_ones_own(strategy, wraps):
    with strategy.scope():
        plain = graph()
        model = OwnMetrics(plain, num_microbatches=2) if wraps else PlainMetrics(plain.inputs, plain.outputs[0])
        KEPT.update(iou=keras.metrics.MeanIoU(3), spread=keras.metrics.Mean())
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fit(model, batch_size=9, epochs=2), [float(KEPT[name].result()) for name in ("iou", "spread")], state(model)


PROGRAMS = [
    exhaustive(steps_per_execution),
    exhaustive(batch_by_batch),
    exhaustive(weights_of_classes),
    exhaustive(frozen_and_thawed),
    low_rank_factors_afterwards,
    exhaustive(low_rank_factors_before),
    not_built,
    exhaustive(model_in_a_model),
    exhaustive(endless_data_and_callbacks),
    exhaustive(accumulation_and_clipping),
    exhaustive(several_outputs_and_a_loss_for_one),
    losses_of_layers_alone,
    exhaustive(metrics_that_are_no_means),
    metrics_that_are_no_sums,
    exhaustive(metrics_of_ones_own),
]


@pytest.mark.parametrize(("data", "zero_stage"), [(1, 0), exhaustive(2, 3)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_is_one_device(program, data, zero_stage):
    strategy = strategy_on(2 * data, pipeline_parallel_size=2, zero_stage=zero_stage)
    found = run(lambda strategy: program(strategy, wraps=True), strategy)
    assert_same_tree(found, run(lambda strategy: program(strategy, wraps=False), one_device()), program.__name__)
