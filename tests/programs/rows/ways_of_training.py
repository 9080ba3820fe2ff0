"""Ways of training in which a function of the batch may stand (see `functions_of_the_batch`), each beside one device.

A program trains one model in which each function has a layer of its own, the head, so that several run in one trace and each has
weights, slots and logs of its own. What it leaves behind is a dictionary: function -> its numbers.

Loops around `strategy.run` are written in one of these ways:

* `loop`: as on one device. The loss is the function as it stands, its value on each rank is logged as `strategy.reduce("MEAN")`.
  That is for what ranks have agreed on; a plain mean would count as often as there are ranks, as docs/training.md says.
* `loop_divided`: the loss of a rank is the function divided by `num_replicas_in_sync`, a share by the third rule of that page:
  what is the same on all ranks is divided by their number. Losses and shares are logged as `strategy.reduce("SUM")`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.devices import names, take
from tests.parity.comparison import BatchLogs, assert_same_tree
from tests.programs.rows.functions_of_the_batch import BATCH, FUNCTIONS, Function

RTOL = 1e-6


@dataclasses.dataclass(frozen=True)
class Form:
    """Batches of three steps."""

    rows: int
    features: int = 5
    units: int = 3
    is_static: bool = False
    batch: int = BATCH

    @property
    def last(self) -> int:
        return self.batch if self.is_static else (self.rows - 1) % self.batch + 1


FORMS = {
    "even": Form(24),
    "uneven": Form(21),  # the last batch has 5 rows
    "empty": Form(17),  # the last batch has one row: all ranks but one have none
    "static": Form(26, is_static=True),
    "coincide": Form(24, 4, 4, is_static=True),  # the rows of one of two ranks, the features, the units
    "coincide_dynamic": Form(20, 4, 4),  # and all rows of the last batch
    "coincide_batch": Form(24, 8, 8, is_static=True),  # the rows of all ranks
    "seven": Form(42, 7, 7, is_static=True, batch=14),
}


def arrays(form: Form) -> tuple[np.ndarray, np.ndarray]:
    """Every fourth row is one that conditions on `x[:, 0]` and `y[:, 0]` select, so that each batch has one."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(form.rows, form.features)), 0.7 * rng.normal(size=(form.rows, form.units))
    x[::4, 0], y[::4, 0] = np.abs(x[::4, 0]) + 0.1, np.abs(y[::4, 0]) + 0.1
    return x, y


def batches(form: Form, *data: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data).batch(form.batch, drop_remainder=form.is_static)


def sgd(**settings: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.03, momentum=0.9, **settings)


def adam(**settings: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, epsilon=1e-3, **settings)


OPTIMIZERS = {"sgd": sgd, "adam": adam}


def head(function: Function, form: Form) -> keras.layers.Layer:
    seed = keras.initializers.GlorotUniform(seed=4)
    return keras.layers.Dense(form.units, "tanh", kernel_initializer=seed, name=function.name)


def one_number(value: Any) -> tf.Tensor:
    return tf.reduce_mean(value) if len(value.shape) else value


class Model(keras.Model):
    """Heads on the same inputs, one for each function; and for a layer's function, what stands before it."""

    def __init__(self, functions: list[Function], form: Form) -> None:
        super().__init__()
        self.functions, self.form = functions, form
        self.heads = [head(function, form) for function in functions]
        self.build_heads()
        self.built = True

    def build_heads(self) -> None:
        for layer in self.heads:
            layer.build((None, self.form.features))

    def call(self, x: tf.Tensor) -> list[tf.Tensor]:
        return [layer(x) for layer in self.heads]

    def values(self, x: tf.Tensor, y: tf.Tensor, predictions: list[tf.Tensor], **more: Any) -> list[tf.Tensor]:
        """What each function makes of the batch."""
        given = zip(self.functions, self.heads, predictions, strict=True)
        return [one_number(function(x=x, y=y, p=p, model=self, layer=layer, **more)) for function, layer, p in given]

    def logged(self, values: list[tf.Tensor]) -> dict[str, tf.Tensor]:
        return {function.name: value for function, value in zip(self.functions, values, strict=True)}

    def squares(self, y: tf.Tensor, predictions: list[tf.Tensor]) -> list[tf.Tensor]:
        """A mean of each head, to train on where the function is no loss."""
        return [tf.reduce_mean(tf.square(p - y)) for p in predictions]

    def apply(self, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)


class Step(Model):
    """The functions are losses in a step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            values = self.values(x, y, self(x, training=True))
            loss = self.optimizer.scale_loss(tf.add_n(values))
        self.apply(tape, loss)
        return self.logged(values)

    def test_step(self, data):
        x, y = data
        return self.logged(self.values(x, y, self(x, training=False)))


class ComputeLoss(Model):
    """Keras's own step, with a loss of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.add_n(self.values(x, y, y_pred))


class Adding(Model):
    """Losses that are added in the call, of a batch that brings its targets along."""

    def call(self, both):
        x, y = both
        predictions = super().call(x)
        for value in self.values(x, y, predictions):
            self.add_loss(value)
        return predictions


class Returned(Model):
    """The functions are numbers that steps return, in training and evaluation."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = tf.add_n(self.squares(y, predictions))
        self.apply(tape, loss)
        return self.logged(self.found(x, y, predictions))

    def test_step(self, data):
        x, y = data
        return self.logged(self.found(x, y, self(x, training=False)))

    def found(self, x, y, predictions):
        return self.values(x, y, predictions)


class Tracked(Returned):
    """They go through trackers."""

    def __init__(self, functions, form):
        super().__init__(functions, form)
        self.trackers = [keras.metrics.Mean(name=f"of_{function.name}") for function in functions]

    def found(self, x, y, predictions):
        for tracker, value in zip(self.trackers, self.values(x, y, predictions), strict=True):
            tracker.update_state(value)
        return [tracker.result() for tracker in self.trackers]


class Assigning(Returned):
    """They are assigned to variables of the model: as an average that moves, or as the function says."""

    def __init__(self, functions, form):
        super().__init__(functions, form)
        self.statistics = [
            self.add_weight(name=f"{function.name}_statistic", shape=(), initializer="ones", trainable=False)
            for function in functions
        ]

    def found(self, x, y, predictions):
        given = zip(self.functions, self.heads, predictions, self.statistics, strict=True)
        for function, layer, p, statistic in given:
            value = one_number(function(x=x, y=y, p=p, model=self, layer=layer, statistic=statistic + 0.0))
            statistic.assign(value if function.kind == "statistic" else 0.9 * statistic + 0.1 * value)
        return [statistic + 0.0 for statistic in self.statistics]


class Statistic(keras.layers.Layer):
    """Assigns in its call, and goes on with what it has assigned."""

    def __init__(self, function):
        super().__init__(name=f"{function.name}_layer")
        self.function = function

    def build(self, shape):
        self.statistic = self.add_weight(name=f"{self.function.name}_statistic", shape=(), initializer="ones", trainable=False)

    def call(self, p, training=False):
        if training:
            x, y = tf.concat([p, tf.sin(3.0 * p)], -1), tf.cos(2.0 * p) - 0.5
            now = self.statistic + 0.0
            value = one_number(self.function(x=x, y=y, p=p, layer=self, model=self, statistic=now))
            self.statistic.assign(value if self.function.kind == "statistic" else 0.9 * now + 0.1 * value)
        return p * (1.0 + 0.1 * tf.tanh(self.statistic))


class InLayers(Model):
    """What the functions make of what they get, in the middle of the model."""

    def __init__(self, functions, form):
        keras.Model.__init__(self)
        self.functions, self.form = functions, form
        shape = (None, form.features)
        self.before = [keras.layers.Dense(form.features, "tanh", name=f"{f.name}_before") for f in functions]
        self.between = [Between(function) for function in functions]
        self.heads = [head(function, form) for function in functions]
        for before, between, layer in zip(self.before, self.between, self.heads, strict=True):
            before.build(shape)
            width = between.compute_output_shape(shape)[-1]
            layer.build((None, width))
        self.built = True

    def call(self, x, training=False):
        given = zip(self.before, self.between, self.heads, strict=True)
        return [layer(between(before(x), training=training)) for before, between, layer in given]


class Between(keras.layers.Layer):
    def __init__(self, function):
        super().__init__(name=f"{function.name}_between")
        self.function = function

    def compute_output_shape(self, shape):
        return (None, int(self.function(h=tf.ones((8, shape[-1]), tf.float64)).shape[-1]))

    def call(self, h):
        return self.function(h=h)


class InStatistics(Model):
    """Each head ends with a layer that assigns a statistic."""

    def build_heads(self):
        super().build_heads()
        self.layers_of_statistics = [Statistic(function) for function in self.functions]
        for layer in self.layers_of_statistics:
            layer.build((None, self.form.units))

    def call(self, x, training=False):
        found = zip(self.layers_of_statistics, super().call(x), strict=True)
        return [layer(p, training=training) for layer, p in found]


class Changing(Model):
    """The functions change the gradients of their heads."""

    def changed(self, x, y, is_mean=True):
        with tf.GradientTape(persistent=True) as tape:
            predictions = self(x, training=True)
            losses = self.squares(y, predictions)
            total = tf.add_n(losses)
        grads = tape.gradient(total, self.trainable_variables)
        found, heads = [], zip(self.functions, self.heads, predictions, losses, strict=True)
        for place, (function, layer, p, loss) in enumerate(heads):
            mine = grads[2 * place : 2 * place + 2]
            found += function(grads=mine, loss=loss, x=x, y=y, p=p, layer=layer, model=self)
        return losses, found

    def train_step(self, data):
        losses, found = self.changed(*data)
        self.optimizer.apply(found, self.trainable_variables)
        return self.logged(losses)


def compiled_losses(functions: list[Function], form: Form, model: list[keras.Model]) -> list[Callable[..., Any]]:
    """Functions of Keras's two arguments: a function that reads inputs finds them beside the targets."""

    def of(place: int, function: Function) -> Callable[..., Any]:
        def loss(y_true, y_pred):
            y, x = y_true[:, : form.units], y_true[:, form.units :]
            owner = model[0]
            return function(x=x, y=y, p=y_pred, model=owner, layer=owner.heads[place])

        loss.__name__ = function.name
        return loss

    return [of(place, function) for place, function in enumerate(functions)]


def by_function(functions: list[Function], model: keras.Model, optimizer: Any, logs: Any) -> dict[str, Any]:
    """What a training leaves behind, sorted by the function it belongs to."""
    variables = {v.path: v.numpy() for v in model.variables}
    variables.update({f"slot {v.path}": v.numpy() for v in (optimizer.variables if optimizer is not None else [])})
    found: dict[str, Any] = {function.name: {} for function in functions}
    found["together"] = {}

    def owner(path: str) -> str:
        words = path.replace("/", " ").split()
        return max((f.name for f in functions if any(_belongs(word, f.name) for word in words)), key=len, default="together")

    for kind, values in (("logs", logs), ("variables", variables)):
        for name, value in values.items():
            found[owner(name)][f"{kind} {name}"] = value
    return found


_PARTS = ("kernel", "bias", "before", "statistic", "layer", "loss", "between")


def _belongs(word: str, name: str) -> bool:
    return word in (name, f"of_{name}") or any(word.startswith(f"{name}_{part}") for part in _PARTS)


def logs_of(record: BatchLogs) -> dict[str, Any]:
    return _columns(record.train, "train") | _columns(record.test, "test")


def _columns(rows: list[dict[str, float]], kind: str) -> dict[str, Any]:
    return {f"{kind} {name}": [row[name] for row in rows] for name in (rows[0] if rows else {})}


Program = Callable[[tf.distribute.Strategy], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    functions: tuple[str, ...]
    way: str
    form: str
    optimizer: str = "sgd"

    def __str__(self) -> str:
        return f"{'+'.join(self.functions)} {self.way} {self.form} {self.optimizer}"


def _fit(model: keras.Model, form: Form, trains: bool = True, evaluates: bool = True, targets: Any = None) -> dict[str, Any]:
    x, y = arrays(form)
    record = BatchLogs()
    data = batches(form, x, y if targets is None else targets(x, y))
    if trains:
        model.fit(data, epochs=1, verbose=0, callbacks=[record])
    if evaluates:
        model.evaluate(data, verbose=0, callbacks=[record])
    return logs_of(record)


def run_step(kind: type[Model], trains: bool = True, evaluates: bool = False, **compiled: Any) -> Callable[..., Any]:
    def run(strategy, functions, form, optimizer):
        settings = {"global_clipnorm": 0.5} if functions[0].kind == "clipped gradient" else {}
        settings |= compiled.get("settings", {})
        with strategy.scope():
            model, trainer = kind(functions, form), optimizer(**settings)
            if "scale" in compiled:
                trainer = keras.optimizers.LossScaleOptimizer(trainer, initial_scale=compiled["scale"])
            model.compile(trainer, run_eagerly=compiled.get("run_eagerly", False))
        return by_function(functions, model, model.optimizer, _fit(model, form, trains, evaluates))

    return run


SHARDED = tfdist.ShardedStrategy | tfdist.MultiWorkerShardedStrategy


def run_compiled(strategy, functions, form, optimizer, as_metrics=False, kind=Model, recomputed=False):
    model: list[Any] = []
    losses = compiled_losses(functions, form, model)
    squares = [lambda y, p: tf.square(y[:, : form.units] - p) for _ in functions]
    with strategy.scope():
        model.append(kind(functions, form))
        if recomputed and isinstance(strategy, SHARDED):
            for function in functions:
                tfdist.recompute(model[0], f"{function.name}$")
        if as_metrics:
            model[0].compile(optimizer(), squares, metrics=[[loss] for loss in losses])
        else:
            model[0].compile(optimizer(), losses)
    targets = lambda x, y: (np.concatenate([y, x], -1),) * len(functions)  # noqa: E731
    return by_function(functions, model[0], model[0].optimizer, _fit(model[0], form, evaluates=as_metrics, targets=targets))


def run_layers(strategy, functions, form, optimizer, kind=InLayers):
    with strategy.scope():
        model = kind(functions, form)
        model.compile(optimizer(), ["mse"] * len(functions))
    logs = _fit(model, form, evaluates=False, targets=lambda x, y: (y,) * len(functions))
    predicted = model.predict(batches(form, arrays(form)[0]), verbose=0)
    for function, found in zip(functions, tf.nest.flatten(predicted), strict=True):
        logs[f"{function.name} predict"] = found
    return by_function(functions, model, model.optimizer, logs)


def run_added(strategy, functions, form, optimizer):
    with strategy.scope():
        model = Adding(functions, form)
        model.compile(optimizer())
    record = BatchLogs()
    x, y = arrays(form)
    data = batches(form, x, y).map(lambda x, y: ((x, y),))
    model.fit(data, verbose=0, callbacks=[record])
    return by_function(functions, model, model.optimizer, logs_of(record))


def run_loop(strategy, functions, form, optimizer, divided=False):
    changes = functions[0].kind in ("gradient", "clipped gradient")
    settings = {"global_clipnorm": 0.5} if functions[0].kind == "clipped gradient" else {}
    with strategy.scope():
        model, trainer = (Changing if changes else Model)(functions, form), optimizer(**settings)
        trainer.build(model.trainable_variables)
    divisor = strategy.num_replicas_in_sync if divided else 1

    def on_rank(x, y):
        with tf.GradientTape() as tape:
            values = [value / divisor for value in model.values(x, y, model(x, training=True))]
            loss = tf.add_n(values)
        trainer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return values

    def changing_on_rank(x, y):
        """The loss is a sum over the global batch's size, a share."""
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            losses = [tf.reduce_sum(tf.square(p - y)) / (form.batch * form.units) for p in predictions]
            total = tf.add_n(losses)
        grads, found = tape.gradient(total, model.trainable_variables), []
        for place, (function, layer, p, loss) in enumerate(zip(functions, model.heads, predictions, losses, strict=True)):
            mine = grads[2 * place : 2 * place + 2]
            found += function(grads=mine, loss=loss, x=x, y=y, p=p, layer=layer, model=model)
        trainer.apply(found, model.trainable_variables)
        return losses

    # A worker whose traces know its number of rows does not know the others'.
    @tf.function(reduce_retracing=isinstance(strategy, tfdist.MultiWorkerShardedStrategy))
    def step(x, y):
        values = strategy.run(changing_on_rank if changes else on_rank, args=(x, y))
        return [strategy.reduce("SUM" if divided or changes else "MEAN", value, axis=None) for value in values]

    data = strategy.experimental_distribute_dataset(batches(form, *arrays(form)))
    rows = [[float(value) for value in step(*batch)] for batch in data]
    logs = {f"loop {function.name}": list(column) for function, column in zip(functions, zip(*rows, strict=True), strict=True)}
    return by_function(functions, model, trainer, logs)


def run_pipeline(strategy, functions, form, optimizer, as_metrics=False):
    """A plain model of two parts, which a strategy with stages has in a pipeline; whole batches are one device's."""
    losses, owner = compiled_losses(functions, form, [types.SimpleNamespace(heads=[None] * len(functions))]), []
    squares = [lambda y, p: tf.reduce_sum(tf.square(y[:, : form.units] - p), -1) for _ in functions]
    with strategy.scope():
        inputs = keras.Input((form.features,))
        hidden = keras.layers.Dense(form.features, "tanh", name="hidden")(inputs)
        model = keras.Model(inputs, [head(function, form)(hidden) for function in functions])
        if isinstance(strategy, SHARDED):
            owner.append(model)
            model = tfdist.PipelineModel(model, num_microbatches=2)
        if as_metrics:
            model.compile(optimizer(), squares, metrics=[[loss] for loss in losses])
        else:
            model.compile(optimizer(), losses)
    targets = lambda x, y: (np.concatenate([y, x], -1),) * len(functions)  # noqa: E731
    logs = _fit(model, form, evaluates=as_metrics, targets=targets)
    return by_function(functions, owner[0] if owner else model, model.optimizer, logs)


LOSS, GRADIENT, LAYER, STATISTIC = ("loss",), ("gradient", "clipped gradient"), ("layer",), ("statistic",)
WAYS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "step": (run_step(Step), LOSS),
    "fit": (run_compiled, LOSS),
    "compute_loss": (run_step(ComputeLoss), LOSS),
    "add_loss": (run_added, LOSS),
    "loop": (run_loop, (*LOSS, *GRADIENT)),
    "loop_divided": (functools.partial(run_loop, divided=True), LOSS),
    "metric": (functools.partial(run_compiled, as_metrics=True), LOSS),
    "tracker": (run_step(Tracked, evaluates=True), LOSS),
    "returned": (run_step(Returned), LOSS),
    "evaluate": (run_step(Step, trains=False, evaluates=True), LOSS),
    "assigned": (run_step(Assigning), (*LOSS, *STATISTIC)),
    "statistic": (functools.partial(run_layers, kind=InStatistics), (*LOSS, *STATISTIC)),
    "gradient": (run_step(Changing), GRADIENT),
    "layer": (run_layers, LAYER),
    "eager": (run_step(Step, run_eagerly=True), LOSS),
    "accumulated": (run_step(Step, settings={"gradient_accumulation_steps": 2}), LOSS),
    "scaled": (run_step(Step, scale=8.0), LOSS),
    "recomputed": (functools.partial(run_compiled, recomputed=True), LOSS),
    "pipeline": (run_pipeline, LOSS),
    "pipeline_metric": (functools.partial(run_pipeline, as_metrics=True), LOSS),
}
PIPELINES = ("pipeline", "pipeline_metric")
NO_LAYER = ("statistic", *PIPELINES)  # ways whose functions have no weights to read


def applies(function: Function, way: str, form: str) -> bool:
    """Whether the function can stand there, and bears the batches."""
    if function.kind not in WAYS[way][1] or (function.ways and way not in function.ways):
        return False
    if way in NO_LAYER and {"layer", "model"} & set(function.needs):
        return False
    return FORMS[form].last >= function.least_rows


def program(case: Case) -> Program:
    functions, form = [FUNCTIONS[name] for name in case.functions], FORMS[case.form]
    run = WAYS[case.way][0]
    return lambda strategy: run(strategy, functions, form, OPTIMIZERS[case.optimizer])


def fresh(program: Program, strategy: Any) -> tuple[dict[str, Any], list[str]]:
    """What the program leaves, and the warnings of which it tells."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = program(strategy)
    return found, [str(one.message) for one in told if one.category is UserWarning]


@functools.cache
def on_one_device(case: Case) -> tuple[dict[str, Any], list[str]]:
    return fresh(program(case), tf.distribute.get_strategy())


def under(case: Case, stage: int, devices: int = 2, **settings: Any) -> tuple[dict[str, Any], list[str]]:
    """The same under a strategy; only warnings that one device does not give."""
    strategy = tfdist.ShardedStrategy(names(devices), zero_stage=stage, **_of_way(case), **settings)
    found, told = fresh(program(case), strategy)
    return found, [message for message in told if message not in on_one_device(case)[1]]


def under_workers(case: Case, stage: int, **settings: Any) -> tuple[dict[str, Any], list[str]]:
    """The same in one worker of a job, with all that is told."""
    return fresh(program(case), tfdist.MultiWorkerShardedStrategy(zero_stage=stage, **_of_way(case), **settings))


def _of_way(case: Case) -> dict[str, Any]:
    return {"pipeline_parallel_size": 2} if case.way in PIPELINES else {}


def error_of(found: Any, expected: Any) -> tuple[float, str]:
    """The largest difference, relative to the largest number of its array (at least 0.01), and where it is."""
    worst, where = 0.0, ""
    if list(found) != list(expected):
        return float("inf"), f"{sorted(set(found) ^ set(expected))}"
    for name, theirs in expected.items():
        one, other = np.asarray(found[name], "float64"), np.asarray(theirs, "float64")
        if one.shape != other.shape:
            return float("inf"), f"{name}: {one.shape} instead of {other.shape}"
        if not (np.isfinite(one) == np.isfinite(other)).all():
            return float("inf"), f"{name} is not finite"
        known = np.isfinite(other)
        away = np.abs(one - other).max(initial=0.0, where=known) / max(np.abs(other).max(initial=0.0, where=known), 1e-2)
        if away > worst:
            worst, where = float(away), name
    return worst, where


def assert_same(case: Case, stage: int, devices: int = 2, is_silent: bool = True, **settings: Any) -> None:
    """All that each function leaves behind is one device's; what is not is told of all functions."""
    found, told = under(case, stage, devices, **settings)
    assert not (faults := faults_of(case, found)), "; ".join(faults)
    assert not (is_silent and told), told


def faults_of(case: Case, found: dict[str, Any]) -> list[str]:
    """What is not one device's: a line for each function."""
    faults = []
    for name, theirs in on_one_device(case)[0].items():
        try:
            assert_same_tree(found[name], theirs, name, RTOL)
        except AssertionError:
            faults.append("{}: {:.1e} in {}".format(name, *error_of(found[name], theirs)))
    return faults


def moved(case: Case) -> dict[str, float]:
    """How far each function moves its head's weights on one device, from where they begin."""
    found, _ = on_one_device(case)
    result = {}
    for name in case.functions:
        kernels = [value for key, value in found[name].items() if key.endswith(f"{name}/kernel") and "slot" not in key]
        seed = keras.initializers.GlorotUniform(seed=4)
        start = [np.asarray(seed(kernel.shape, dtype="float64")) for kernel in kernels]
        result[name] = max((float(np.abs(a - b).max()) for a, b in zip(kernels, start, strict=True)), default=0.0)
    return result


# The script.


class Late(Exception):
    """A case took longer than it may."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Late(f"after {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


class Watch:
    """Begins the process anew behind a case that hangs where no signal arrives."""

    def __init__(self, seconds: int, again: Callable[[], None]) -> None:
        self.seconds, self.again, self.since = seconds, again, None
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(1)
            if self.since is not None and time.monotonic() - self.since > self.seconds:
                self.again()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m tests.programs.rows.functions_of_the_batch", description=__doc__.splitlines()[0])
    made.add_argument(
        "--only", default="", help="names of functions, with commas; a part of a name is enough with a * at its end"
    )
    made.add_argument(
        "--group", default="", help="groups, with commas: means, numbers, rows, meeting, told, gradients, layers, ..."
    )
    made.add_argument("--way", default="", help=f"with commas, of {', '.join(WAYS)}, or `all`; by default the first that fits")
    made.add_argument("--form", default="uneven", help=f"with commas, of {', '.join(FORMS)}, or `all`")
    made.add_argument("--stage", default="3", help="with commas")
    made.add_argument("--devices", type=int, default=2)
    made.add_argument("--tensor", type=int, default=1, help="tensor ranks among the devices")
    made.add_argument("--optimizer", default="sgd", choices=list(OPTIMIZERS))
    made.add_argument("--together", type=int, default=1, help="so many functions in one trace: quick; warnings are those of all")
    made.add_argument("--one-device", action="store_true", help="runs them on one device alone: how far the weights move")
    made.add_argument("--failing", action="store_true", help="prints the lines of what is not exact and silent only")
    made.add_argument("--words", type=int, default=110, help="so many characters of a warning or an error")
    made.add_argument("--traceback", action="store_true")
    made.add_argument("--with-optimizer", action="store_true", help="leaves TensorFlow's graph optimizer on")
    made.add_argument("--timeout", type=int, default=90, help="seconds of a case")
    made.add_argument("--start", type=int, default=0, help="the number of the first case")
    return made


def chosen(arguments: argparse.Namespace) -> list[tuple[Case, int]]:
    """The cases to run, functions of one kind and one way together."""

    def split(text: str, everything: Any) -> list[str]:
        return list(everything) if text == "all" else [word for word in text.split(",") if word]

    def fits(function: Function) -> bool:
        words, groups = split(arguments.only, ()), split(arguments.group, ())
        named = any(function.name.startswith(w[:-1]) if w.endswith("*") else function.name == w for w in words)
        return (named or not words) and (not groups or function.group in groups)

    unknown = {w for w in split(arguments.only, ()) if not w.endswith("*")} - set(FUNCTIONS)
    if unknown:
        raise SystemExit(f"no function is called {', '.join(sorted(unknown))}")
    functions = [function for function in FUNCTIONS.values() if fits(function)]
    found: dict[tuple[Any, ...], list[str]] = collections.defaultdict(list)
    for form in split(arguments.form, FORMS):
        for stage in map(int, split(arguments.stage, "0123")):
            for function in functions:
                first = next(way for way, (_, kinds) in WAYS.items() if function.kind in kinds and way != "loop")
                for way in split(arguments.way, WAYS) or [first]:
                    if applies(function, way, form):
                        found[stage, way, form, function.kind].append(function.name)
    cases = []
    for (stage, way, form, _), members in found.items():
        for place in range(0, len(members), arguments.together):
            together = tuple(members[place : place + arguments.together])
            cases.append((Case(together, way, form, arguments.optimizer), stage))
    return cases


def prepare(with_optimizer: bool) -> None:
    """What tests/conftest.py does."""
    from tests import garbage, graph_optimizer, layer_groups, op_creation
    from tfdist import keras_hooks

    tf.get_logger().setLevel("ERROR")
    take(4)
    graph_optimizer.only_for_calls()
    layer_groups.gather_each_layer_alone()
    garbage.collect_seldom()
    op_creation.simplify()
    keras_hooks.install()
    graph_optimizer.switch(on=with_optimizer)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


_SO_FAR = "TFDIST_FUNCTIONS_SO_FAR"
EXACT, TOLD_EXACT, TOLD_WRONG, SILENT_WRONG, ERROR, LATE = "exact", "exact+told", "wrong+told", "WRONG", "ERROR", "LATE"


def main() -> None:
    from tests import garbage

    arguments = parser().parse_args()
    cases = chosen(arguments)
    planned = len(cases)
    so_far = json.loads(os.environ.get(_SO_FAR, '{"counts": [], "alone": []}'))
    counts = collections.Counter({tuple(key): n for key, n in so_far["counts"]})
    cases.extend((Case(tuple(names_of), *rest), stage) for (names_of, *rest), stage in so_far["alone"])
    begun = time.monotonic()
    at = [arguments.start]

    def count(case: Case, name: str, verdict: str) -> None:
        counts[FUNCTIONS[name].group if name in FUNCTIONS else "together", verdict] += 1

    def line(verdict: str, case: Case, stage: int, name: str, text: str) -> None:
        if not (arguments.failing and verdict == EXACT):
            print(f"{at[0]:4d} {verdict:10s} {name:36s} {case.way:12s} {case.form:16s} {stage} {text}", flush=True)

    def again() -> None:
        case, stage = cases[at[0]]
        for name in case.functions:
            count(case, name, LATE)
            line(LATE, case, stage, name, "hangs")
        extra = [[dataclasses.astuple(case), stage] for case, stage in cases[planned:]]
        os.environ[_SO_FAR] = json.dumps({"counts": [[list(key), n] for key, n in counts.items()], "alone": extra})
        words = [word for word in sys.argv[1:] if not word.startswith("--start=")]
        module = "tests.programs.rows.functions_of_the_batch"
        os.execv(sys.executable, [sys.executable, "-m", module, *words, f"--start={at[0] + 1}"])

    prepare(arguments.with_optimizer)
    watch = Watch(arguments.timeout + 10, again)
    settings = {"tensor_parallel_size": arguments.tensor} if arguments.tensor > 1 else {}
    number = arguments.start - 1
    while (number := number + 1) < len(cases):
        case, stage = cases[number]
        at[0], watch.since, start = number, time.monotonic(), time.monotonic()
        try:
            with limited(arguments.timeout):
                if arguments.one_device:
                    _report_one_device(case, stage, line, count)
                else:
                    _report(case, stage, arguments, settings, line, count, start)
        except Exception as error:
            if len(case.functions) > 1 and not isinstance(error, Late):
                alone = [(dataclasses.replace(case, functions=(name,)), stage) for name in case.functions]
                print(f"{number:4d} {type(error).__name__} of {len(alone)} together: each alone, at the end", flush=True)
                cases.extend(alone)
                watch.since = None
                continue
            text = " ".join(f"{type(error).__name__}: {error}".split())
            for name in case.functions:
                count(case, name, ERROR)
                line(ERROR, case, stage, name, text[: arguments.words])
            if arguments.traceback:
                import traceback

                traceback.print_exc()
        watch.since = None
        garbage.leave_alone_what_is_there()
    _print_counts(counts, time.monotonic() - begun)


def _report(case, stage, arguments, settings, line, count, start) -> None:
    found, told = under(case, stage, arguments.devices, **settings)
    words = " | ".join(dict.fromkeys(" ".join(message.split())[: arguments.words] for message in told))
    errors = {name: error_of(found[name], theirs) for name, theirs in on_one_device(case)[0].items() if theirs}
    of_all = errors.pop("together", (0.0, ""))
    if len(case.functions) == 1:
        errors = {name: max(error, of_all, key=lambda pair: pair[0]) for name, error in errors.items()}
    elif of_all[0] > RTOL:
        print(f"{'':16s}together: {of_all[0]:.1e} {of_all[1]}", flush=True)
    for name, (error, where) in errors.items():
        right = error <= RTOL
        verdict = (TOLD_EXACT if right else TOLD_WRONG) if told else (EXACT if right else SILENT_WRONG)
        count(case, name, verdict)
        line(verdict, case, stage, name, f"{error:.1e} {where if not right else ''} {time.monotonic() - start:.1f}s {words}")


def _report_one_device(case, stage, line, count) -> None:
    found, _ = on_one_device(case)
    for name, by in moved(case).items():
        finite = all(np.isfinite(np.asarray(value, "float64")).all() for value in found[name].values())
        verdict = EXACT if finite and by > 1e-3 else SILENT_WRONG
        count(case, name, verdict)
        line(verdict, case, stage, name, f"moves by {by:.1e}{'' if finite else ', not finite'}")


def _print_counts(counts: collections.Counter, seconds: float) -> None:
    verdicts = [EXACT, TOLD_EXACT, TOLD_WRONG, SILENT_WRONG, ERROR, LATE]
    print(f"\n{'':12s}" + "".join(f"{verdict:>12s}" for verdict in verdicts) + f"   ({seconds:.0f} s)")
    groups = list(dict.fromkeys(group for group, _ in counts))
    for group in groups:
        print(f"{group:12s}" + "".join(f"{counts[group, verdict]:12d}" for verdict in verdicts))
    if len(groups) > 1:
        print(f"{'all':12s}" + "".join(f"{sum(counts[g, v] for g in groups):12d}" for v in verdicts))
