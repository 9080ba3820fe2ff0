"""The kinds of steps that are audited: each a function that returns the graph of a step, traced and not run.

The ranks' devices are CPU:1, CPU:2, ..., which stand for GPUs; CPU:0 is the host.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function

import tfdist
from tfdist import collectives
from tfdist.extensions.compression import NAMES

layers = keras.layers
RNG = np.random.default_rng(0)
ROWS, LENGTH, WIDTH, WORDS, CLASSES = 8, 6, 8, 16, 7
Step = Callable[[], tf.Graph]
STEPS: dict[str, Step] = {}


class _Caught(Exception):
    def __init__(self, graph: tf.Graph):
        super().__init__("caught")
        self.graph = graph


def caught(run: Callable[[], Any], name: str = "multi_step_on_iterator") -> tf.Graph:
    """Returns the graph of the first function of `name` that `run` calls eagerly, which it stops from running."""

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if tf.executing_eagerly() and name in self.graph.name:
            raise _Caught(self.graph)
        return original(self, *arguments, **named)

    original = concrete_function.ConcreteFunction._call_flat
    with mock.patch.object(concrete_function.ConcreteFunction, "_call_flat", call):
        try:
            run()
        except _Caught as found:
            return found.graph
    raise AssertionError(f"nothing called {name!r}")


# Strategies, models and data


def strategy(ranks: int = 2, **settings: Any) -> tfdist.ShardedStrategy:
    return tfdist.ShardedStrategy([f"CPU:{1 + rank}" for rank in range(ranks)], **settings)


def vectors() -> tuple[np.ndarray, np.ndarray]:
    return RNG.normal(size=(ROWS, 15)).astype("float32"), RNG.integers(0, CLASSES, ROWS)


def words() -> tuple[np.ndarray, np.ndarray]:
    return RNG.integers(0, WORDS, (ROWS, LENGTH)).astype("int32"), RNG.integers(0, WORDS, (ROWS, LENGTH))


def images() -> tuple[np.ndarray, np.ndarray]:
    return RNG.normal(size=(ROWS, 9, 9, 3)).astype("float32"), RNG.integers(0, CLASSES, ROWS)


def mlp() -> keras.Model:
    return keras.Sequential([keras.Input((15,)), layers.Dense(33, "tanh"), layers.Dense(33, "gelu"), layers.Dense(CLASSES)])


def wide() -> keras.Model:
    return keras.Sequential([keras.Input((15,)), layers.Dense(301, "tanh"), layers.Dense(33), layers.Dense(CLASSES)])


def transformer(dropout: float = 0.1) -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="words")(inputs)
    for number in range(2):
        y = layers.LayerNormalization(name=f"norm_{number}")(x)
        y = layers.MultiHeadAttention(2, WIDTH // 2, dropout=dropout, name=f"attention_{number}")(y, y, use_causal_mask=True)
        x = layers.Dropout(dropout)(x + y)
        y = layers.Dense(3 * WIDTH, "gelu", name=f"wide_{number}")(x)
        x = x + layers.Dense(WIDTH, name=f"narrow_{number}")(y)
    return keras.Model(inputs, layers.Dense(WORDS, name="logits")(x))


def convolutions() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((9, 9, 3)),
            layers.Conv2D(8, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 3),
            layers.BatchNormalization(),
            layers.SpatialDropout2D(0.2),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.3),
            layers.Dense(CLASSES),
        ]
    )


def recurrent(layer: type[keras.layers.Layer], **settings: Any) -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(inputs)
    return keras.Model(inputs, layers.Dense(WORDS)(layer(WIDTH, return_sequences=True, **settings)(x)))


def crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def adamw(**settings: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(1e-3, **settings)


@contextlib.contextmanager
def policy(name: str) -> Iterator[None]:
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def compiled(
    on: tfdist.ShardedStrategy,
    build: Callable[[], keras.Model],
    optimizer: Callable[[], keras.optimizers.Optimizer] = adamw,
    loss: Callable[[], keras.losses.Loss] = crossentropy,
    **settings: Any,
) -> keras.Model:
    keras.utils.set_random_seed(3)
    with on.scope():
        model = build()
        model.compile(optimizer=optimizer(), loss=loss(), **settings)
    return model


def fit(model: keras.Model, data: tuple[Any, ...], batch_size: int = ROWS, **settings: Any) -> tf.Graph:
    return caught(lambda: model.fit(*data, batch_size=batch_size, verbose=0, shuffle=False, **settings))


def step(name: str) -> Callable[[Step], Step]:
    def add(function: Step) -> Step:
        STEPS[name] = function
        return function

    return add


# Stages, policies


def _stage(stage: int, dtypes: str) -> tf.Graph:
    with policy(dtypes):
        return fit(compiled(strategy(zero_stage=stage), transformer, metrics=["accuracy"]), words())


for _dtypes in ("float32", "mixed_float16", "mixed_bfloat16"):
    for _number in range(4):
        STEPS[f"stage {_number}/{_dtypes}"] = functools.partial(_stage, _number, _dtypes)

for _number in (0, 2):

    @step(f"stage {_number}/reduce_dtype bfloat16")
    def _(stage: int = _number) -> tf.Graph:
        return fit(compiled(strategy(3, zero_stage=stage, reduce_dtype="bfloat16"), mlp), vectors(), 6)


for _name in NAMES:
    for _number in (0, 2, 3):

        @step(f"stage {_number}/compressed: {_name}")
        def _(stage: int = _number, name: str = _name) -> tf.Graph:
            return fit(compiled(strategy(3, zero_stage=stage, gradient_compression=name), wide), vectors(), 6)


@step("stage 3/compressed parameters")
def _() -> tf.Graph:
    with policy("mixed_bfloat16"):
        return fit(compiled(strategy(3, zero_stage=3, parameter_compression="int8"), wide), vectors(), 6)


@step("stage 2/compressed parameters")
def _() -> tf.Graph:
    return fit(compiled(strategy(3, zero_stage=2, parameter_compression="int4"), wide), vectors(), 6)


# Optimizers

OPTIMIZERS = {
    "accumulation": lambda: adamw(gradient_accumulation_steps=2),
    "global_clipnorm": lambda: adamw(global_clipnorm=1.0),
    "clipnorm": lambda: adamw(clipnorm=1.0),
    "clipvalue": lambda: adamw(clipvalue=0.1),
    "ema": lambda: adamw(use_ema=True, ema_overwrite_frequency=3),
    "schedule": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(1e-3, 100, warmup_target=2e-3, warmup_steps=5)
    ),
    "loss scale, clipped": lambda: keras.optimizers.LossScaleOptimizer(adamw(global_clipnorm=1.0)),
    "loss scale, accumulation": lambda: keras.optimizers.LossScaleOptimizer(adamw(gradient_accumulation_steps=2)),
    "owners: Muon": lambda: keras.optimizers.Muon(1e-3),
    "owners: Lamb, clipped": lambda: keras.optimizers.Lamb(1e-3, clipnorm=1.0),
    "owners: Adafactor": lambda: keras.optimizers.Adafactor(1e-3),
    "SGD": lambda: keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True),
    "Adam, amsgrad": lambda: keras.optimizers.Adam(1e-3, amsgrad=True),
    "Nadam": lambda: keras.optimizers.Nadam(1e-3),
    "Adamax": lambda: keras.optimizers.Adamax(1e-3),
    "Lion": lambda: keras.optimizers.Lion(1e-3),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(1e-3),
    "Adadelta": lambda: keras.optimizers.Adadelta(1e-3),
    "Ftrl": lambda: keras.optimizers.Ftrl(1e-3),
}
OF_EVERY_STAGE = ("accumulation", "global_clipnorm", "loss scale, accumulation", "owners: Muon", "owners: Lamb, clipped")

for _name, _optimizer in OPTIMIZERS.items():
    for _number in (0, 1, 2, 3) if _name in OF_EVERY_STAGE else (2,):
        STEPS[f"{_name}/stage {_number}"] = lambda optimizer=_optimizer, stage=_number: fit(
            compiled(strategy(zero_stage=stage), mlp, optimizer), vectors()
        )


# Layers, losses, metrics


@step("convolutions/stage 3")
def _() -> tf.Graph:
    return fit(compiled(strategy(zero_stage=3), convolutions, metrics=["accuracy"]), images())


@step("words as int64/stage 3")
def _() -> tf.Graph:
    x, y = words()
    build = lambda: keras.Sequential([keras.Input((LENGTH,), dtype="int64"), layers.Embedding(WORDS, WIDTH), layers.Dense(WORDS)])  # noqa: E731
    return fit(compiled(strategy(zero_stage=3), build), (x.astype("int64"), y))


@step("words as int32/stage 3")
def _() -> tf.Graph:
    build = lambda: keras.Sequential([keras.Input((LENGTH,), dtype="int32"), layers.Embedding(WORDS, WIDTH), layers.Dense(WORDS)])  # noqa: E731
    return fit(compiled(strategy(zero_stage=3), build), words())


@step("convolutions in groups/stage 2")
def _() -> tf.Graph:
    def build() -> keras.Model:
        convolution = layers.Conv2D(8, 3, groups=2)
        return keras.Sequential(
            [
                keras.Input((9, 9, 4)),
                convolution,
                layers.DepthwiseConv2D(3, dilation_rate=2),
                layers.Flatten(),
                layers.Dense(CLASSES),
            ]
        )

    x, y = images()
    return fit(compiled(strategy(zero_stage=2), build), (np.concatenate([x, x[..., :1]], -1), y))


@step("convolutions/mixed_bfloat16")
def _() -> tf.Graph:
    with policy("mixed_bfloat16"):
        return fit(compiled(strategy(zero_stage=2), convolutions), images())


for _layer in (layers.LSTM, layers.GRU, layers.SimpleRNN):
    STEPS[f"{_layer.__name__}/stage 3"] = lambda layer=_layer: fit(
        compiled(strategy(zero_stage=3), functools.partial(recurrent, layer)), words()
    )
STEPS["LSTM in a loop/stage 3"] = lambda: fit(
    compiled(strategy(zero_stage=3), functools.partial(recurrent, layers.LSTM, recurrent_dropout=0.1)), words()
)


@step("constraints, penalties/stage 3")
def _() -> tf.Graph:
    def build() -> keras.Model:
        hidden = layers.Dense(33, "tanh", kernel_regularizer="l2", kernel_constraint=keras.constraints.MaxNorm(0.9))
        return keras.Sequential([keras.Input((15,)), hidden, layers.Dense(CLASSES, activity_regularizer="l2")])

    return fit(compiled(strategy(zero_stage=3), build), vectors())


@step("metrics/stage 2")
def _() -> tf.Graph:
    metrics = keras.metrics
    chosen = [
        metrics.SparseCategoricalAccuracy(),
        metrics.SparseTopKCategoricalAccuracy(3),
        metrics.SparseCategoricalCrossentropy(from_logits=True),
    ]
    return fit(compiled(strategy(zero_stage=2), mlp, metrics=chosen), vectors())


@step("metrics of predictions/stage 2")
def _() -> tf.Graph:
    metrics = keras.metrics
    chosen = [metrics.AUC(), metrics.Precision(), metrics.F1Score(), metrics.R2Score(), metrics.MeanSquaredError()]
    build = lambda: keras.Sequential([keras.Input((15,)), layers.Dense(CLASSES, "sigmoid")])  # noqa: E731
    x, y = vectors()
    loss = keras.losses.BinaryCrossentropy
    return fit(compiled(strategy(zero_stage=2), build, loss=loss, metrics=chosen), (x, np.eye(CLASSES, dtype="float32")[y]))


@step("weights of rows and classes/stage 2")
def _() -> tf.Graph:
    x, y = vectors()
    weights = {number: 1.0 + number for number in range(CLASSES)}
    model = compiled(strategy(zero_stage=2), mlp, weighted_metrics=["accuracy"])
    return fit(model, (x, y), class_weight=weights)


for _number in (0, 3):

    @step(f"uneven batches/stage {_number}")
    def _(stage: int = _number) -> tf.Graph:
        x, y = vectors()
        return fit(compiled(strategy(3, zero_stage=stage), convolutions, metrics=["accuracy"]), images(), 7)


@step("recomputation/stage 3")
def _() -> tf.Graph:
    def build() -> keras.Model:
        model = transformer()
        tfdist.recompute(model, "wide|narrow")
        return model

    return fit(compiled(strategy(zero_stage=3), build), words())


@step("steps_per_execution/stage 2")
def _() -> tf.Graph:
    return fit(compiled(strategy(zero_stage=2), mlp, steps_per_execution=2), vectors(), 4)


@step("evaluate/stage 3")
def _() -> tf.Graph:
    model = compiled(strategy(zero_stage=3), transformer, metrics=["accuracy"])
    return caught(lambda: model.evaluate(*words(), batch_size=ROWS, verbose=0))


@step("predict/stage 3")
def _() -> tf.Graph:
    model = compiled(strategy(zero_stage=3), transformer)
    return caught(lambda: model.predict(words()[0], batch_size=ROWS, verbose=0), "one_step_on_data")


# Steps of one's own


class OwnStep(keras.Model):
    """Computes its loss and clips its gradient by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = layers.Dense(33, "tanh"), layers.Dense(CLASSES)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.head(self.hidden(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tfdist.clip_by_global_norm(gradients, self.trainable_variables, 1.0)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


for _number in (1, 3):
    STEPS[f"train_step of one's own/stage {_number}"] = lambda stage=_number: fit(
        compiled(strategy(zero_stage=stage), OwnStep), vectors()
    )


@step("loop of one's own/stage 2")
def _() -> tf.Graph:
    on = strategy(zero_stage=2)
    with on.scope():
        model, optimizer = mlp(), adamw()
        optimizer.build(model.trainable_variables)

    def on_rank(data: Any) -> tf.Tensor:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(
                keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            )
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def train(iterator: Any) -> tf.Tensor:
        return on.reduce("SUM", on.run(on_rank, args=(next(iterator),)), axis=None)

    data = tf.data.Dataset.from_tensor_slices(vectors()).batch(ROWS, drop_remainder=True)
    return train.get_concrete_function(iter(on.experimental_distribute_dataset(data))).graph


@step("collectives of every dtype")
def _() -> tf.Graph:
    on = strategy(3)

    def on_rank() -> list[tf.Tensor]:
        results = []
        for dtype in (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64):
            x = tf.ones([6, 3], dtype)
            results += [collectives.all_reduce(x, reduce_op=reduce_op) for reduce_op in ("sum", "max", "min")]
            results += [collectives.all_gather(x), collectives.all_to_all(x), collectives.broadcast(x)]
            results += [] if dtype == tf.int32 else [collectives.reduce_scatter(x)]
        large = tf.ones([2**20], tf.bfloat16)
        return [*results, collectives.all_reduce(large), collectives.all_gather(tf.ones([3]), uneven=True)]

    return tf.function(lambda: on.run(on_rank), autograph=False).get_concrete_function().graph


@step("collectives of unknown lengths")
def _() -> tf.Graph:
    """As of the activations of a batch of unknown size: the lengths are made into keys and padding."""
    on = strategy(2, tensor_parallel_size=2)

    def on_rank(x: tf.Tensor) -> list[tf.Tensor]:
        program, doubled = collectives.current_program("a step"), 2 * x
        return [
            collectives.activations.all_reduce(program, doubled, "tensor", "sum"),
            collectives.activations.all_gather(program, doubled, "tensor", 1, "gather"),
            collectives.activations.reduce_scatter(program, doubled, "tensor", 1, "scatter"),
        ]

    step = tf.function(lambda x: on.run(on_rank, args=(x,)), autograph=False)
    return step.get_concrete_function(tf.TensorSpec([None, 4, 5])).graph
