"""Models to be cut in stages, odd where they can be, and how they are trained."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.parity.comparison import losses_of_fit, state
from tests.training import JoinedWeights

layers = keras.layers
ROWS, BATCH = 144, 24  # 6 batches, which 2, 3 and 8 microbatches cut evenly
VOCABULARY, LENGTH, CLASSES = 11, 6, 3


def chain() -> keras.Model:
    """A Sequential with dropout, BatchNormalization, and losses of layers in every stage."""
    return keras.Sequential(
        [
            keras.Input((7,)),
            layers.Dense(9, "tanh", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(
                5,
                "tanh",
                activity_regularizer=keras.regularizers.L2(0.1),
                kernel_constraint=keras.constraints.MaxNorm(0.9),
            ),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(CLASSES, kernel_regularizer="l2"),
        ]
    )


def noisy() -> keras.Model:
    """Random numbers and statistics in both of two stages, and little else."""
    return keras.Sequential(
        [
            keras.Input((7,)),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(9, "tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(CLASSES),
        ]
    )


def plain() -> keras.Model:
    """Two layers of odd sizes, where only their weights are the point."""
    return keras.Sequential([keras.Input((7,)), layers.Dense(9, "tanh"), layers.Dense(CLASSES)])


def branches() -> keras.Model:
    """Two inputs and two outputs; a connection that skips stages, an input of a late stage, and operations without weights."""
    a, b = keras.Input((7,), name="a"), keras.Input((4,), name="b")
    skipping = x = layers.Dense(9, "tanh", name="first")(a)
    for index in range(4):
        x = layers.Dense(9, "tanh", name=f"hidden_{index}")(x)
    x = layers.Concatenate()([x, skipping, b])
    classes = layers.Dense(CLASSES, name="classes")(x)
    x = keras.ops.tanh(layers.Dense(5, name="narrow")(x) + 0.5)
    return keras.Model({"a": a, "b": b}, {"classes": classes, "value": layers.Dense(1, name="value")(x)})


def masked() -> keras.Model:
    """A mask that goes through an attention to the loss."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 8, mask_zero=True)(tokens)
    x = layers.Dense(8, "tanh")(x)
    x = layers.MultiHeadAttention(2, 4)(x, x)
    return keras.Model(tokens, layers.Dense(VOCABULARY)(x))


def recurrent() -> keras.Model:
    """A mask that goes through a recurrent layer, which is a loop, to the loss; and a layer that joins its weights."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 8, mask_zero=True)(tokens)
    x = JoinedWeights()(layers.SimpleRNN(8, return_sequences=True)(x))
    return keras.Model(tokens, layers.Dense(VOCABULARY)(x))


@keras.saving.register_keras_serializable("tests")
class Head(layers.Layer):
    """Logits from the table of an embedding, which is a layer of another stage."""

    def __init__(self, table: Any, **kwargs: Any):
        super().__init__(**kwargs)
        self.table = table

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))


def tied() -> keras.Model:
    """The first and the last stage share a weight; a Dense of the middle is called twice."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    table = layers.Embedding(VOCABULARY, 8, embeddings_regularizer="l2")
    x = table(tokens)
    twice = layers.Dense(8, "tanh", name="twice")
    x = twice(layers.Dense(8, "tanh")(twice(x)))
    return keras.Model(tokens, Head(table)(x))


def tensor_parallel() -> keras.Model:
    """Layers that are cut over the tensor axis."""
    return _between_vocabularies(tfdist.layers.ParallelMLP(12, name="mlp"))


def sequence_parallel() -> keras.Model:
    """Activations between blocks, and so stages, are cut, too."""
    block = functools.partial(tfdist.layers.ParallelTransformerBlock, 2, 12, sequence_parallel=True)
    lean = {"use_bias": False, "normalization": "rms"}
    return _between_vocabularies(block(gather_output=False, name="first"), block(input_is_parallel=True, name="second", **lean))


def _between_vocabularies(*blocks: keras.layers.Layer) -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = tfdist.layers.VocabParallelEmbedding(VOCABULARY, 8, mask_zero=True)(tokens)
    for block in blocks:
        x = block(x)
    return keras.Model(tokens, tfdist.layers.ColumnParallelDense(VOCABULARY + 1, gather_output=False)(x))


def crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data(name: str) -> tuple[Any, Any, Any]:
    """Returns x, y and the sample weights, or None."""
    rng = np.random.default_rng(4)
    classes = rng.integers(0, CLASSES, ROWS)
    if name == "chain":
        return rng.normal(size=(ROWS, 7)), classes, rng.random(ROWS)
    if name in ("plain", "noisy"):
        return rng.normal(size=(ROWS, 7)), classes, None
    if name == "branches":
        x = {"a": rng.normal(size=(ROWS, 7)), "b": rng.normal(size=(ROWS, 4))}
        return x, {"classes": classes, "value": rng.normal(size=(ROWS, 1))}, None
    tokens = rng.integers(1, VOCABULARY, (ROWS, LENGTH))
    tokens[:, 3:] *= rng.integers(0, 2, (ROWS, 3))
    return tokens, rng.integers(0, VOCABULARY, (ROWS, LENGTH)), None


MODELS = {
    "chain": chain,
    "noisy": noisy,
    "plain": plain,
    "branches": branches,
    "masked": masked,
    "recurrent": recurrent,
    "tied": tied,
    "tensor parallel": tensor_parallel,
    "sequence parallel": sequence_parallel,
}
LOSSES: dict[str, Callable[[], Any]] = {name: crossentropy for name in MODELS}
for name in ("tensor parallel", "sequence parallel"):
    LOSSES[name] = functools.partial(tfdist.layers.VocabParallelCrossentropy, from_logits=True)
LOSSES["branches"] = lambda: {"classes": crossentropy(), "value": "mse"}


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def compiled(strategy: Any, name: str, optimizer: Callable[[], Any] = momentum, **settings: Any) -> keras.Model:
    """Builds and compiles a model: pipelined, unless `settings` are empty."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = MODELS[name]()
        if settings:
            model = tfdist.PipelineModel(model, **settings)
        metrics = ["sparse_categorical_accuracy"] if name == "chain" else None
        model.compile(optimizer(), LOSSES[name](), metrics=metrics)
    return model


def train(
    strategy: Any, name: str, optimizer: Callable[[], Any] = momentum, infers: bool = True, **settings: Any
) -> dict[str, Any]:
    """Trains 6 steps with `fit`; if it `infers`, evaluates and predicts, also batches that do not divide."""
    model, found = fitted(strategy, name, optimizer, **settings)
    return {**found, **inferred(model, name)} if infers else found


def fitted(
    strategy: Any, name: str, optimizer: Callable[[], Any] = momentum, **settings: Any
) -> tuple[keras.Model, dict[str, Any]]:
    """Trains 6 steps with `fit`."""
    model = compiled(strategy, name, optimizer, **settings)
    x, y, sample_weight = data(name)
    losses, history = losses_of_fit(model, x, y, sample_weight=sample_weight, batch_size=BATCH, shuffle=False)
    assert len(losses) == ROWS // BATCH and max(losses) > min(losses), "nothing was learnt: an empty comparison"
    return model, {"losses": losses, "history": history, **state(model)}


def inferred(model: keras.Model, name: str) -> dict[str, Any]:
    """Evaluates and predicts, also batches that do not divide."""
    x, y, sample_weight = data(name)
    evaluated = model.evaluate(x, y, sample_weight=sample_weight, batch_size=47, verbose=0, return_dict=True)
    few = tf.nest.map_structure(lambda array: array[:10], x)
    return {"evaluate": evaluated, "predict": model.predict(few, batch_size=5, verbose=0)}


def custom_loop(strategy: Any, name: str, **settings: Any) -> dict[str, Any]:
    """Trains 6 steps with `strategy.run` and `compute_gradients`; before that, computes gradients that nobody reads."""
    model = compiled(strategy, name, **settings)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor, trains: bool) -> tf.Tensor:
        def on_rank(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            loss, gradients = model.compute_gradients(x, y)
            if trains:
                model.optimizer.apply_gradients(gradients)
            return loss

        return strategy.reduce("SUM", strategy.run(on_rank, args=(x, y)), axis=None)

    x, y, _ = data(name)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
    dataset = strategy.experimental_distribute_dataset(dataset)
    losses = [float(step(*next(iter(dataset)), False)), *(float(step(*batch, True)) for batch in dataset)]
    return {"losses": losses, **state(model)}
