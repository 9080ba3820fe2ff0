"""Models of tensor-parallel layers, odd where a size is not sharded, and how they are trained."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.parity.comparison import losses_of_fit, state

layers = tfdist.layers
VOCABULARY, LENGTH, WIDTH, CLASSES = 13, 8, 12, 20
ROWS, BATCH = 34, 6  # the last batch has 4 rows: sizes that are known at run time only
# What is fed batches of one size, known when a step is traced.
WHOLE_BATCHES = ("pair", "grouped queries, gated", "sequence parallel, grouped queries")


def frobenius(kernel: Any) -> Any:
    """A regularizer that is no sum over elements."""
    return 0.01 * keras.ops.sqrt(keras.ops.sum(keras.ops.square(kernel)))


def dense() -> keras.Model:
    """Both layers alone and as a pair, gathered and scattered, regularized and constrained."""
    return keras.Sequential(
        [
            keras.Input((LENGTH,)),
            layers.ColumnParallelDense(20, "tanh", gather_output=False, kernel_regularizer="l2", name="up"),
            layers.RowParallelDense(7, input_is_parallel=True, kernel_constraint=keras.constraints.MaxNorm(0.9), name="down"),
            layers.ColumnParallelDense(8, "softmax", kernel_regularizer=frobenius, name="gathered"),
            layers.RowParallelDense(CLASSES, name="scattered"),
        ]
    )


def pair() -> keras.Model:
    """One layer of each kind, where only their weights are the point."""
    return keras.Sequential(
        [
            keras.Input((LENGTH,)),
            layers.ColumnParallelDense(20, "tanh", gather_output=False, kernel_regularizer="l2", name="up"),
            layers.RowParallelDense(7, input_is_parallel=True, kernel_constraint=keras.constraints.MaxNorm(0.9), name="down"),
            keras.layers.Dense(CLASSES, use_bias=False, name="last"),
        ]
    )


GROUPED_QUERIES = {"key_dim": 4, "num_key_value_heads": 4, "normalization": "rms"}


def transformer(*blocks: dict[str, Any], mask_zero: bool = True) -> keras.Model:
    """Embedding, a block of each of the options, and logits that stay sharded."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.VocabParallelEmbedding(VOCABULARY, WIDTH, mask_zero=mask_zero, name="tokens")(tokens)
    for i, options in enumerate(blocks):
        x = layers.ParallelTransformerBlock(4, 16, **options, name=f"block_{i}")(x)
    return keras.Model(tokens, layers.ColumnParallelDense(CLASSES, gather_output=False, name="logits")(x))


class Tied(keras.Model):
    """Logits from the table of the embedding, whose rows no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.VocabParallelReversibleEmbedding(VOCABULARY, WIDTH, name="table")
        self.mlp = layers.ParallelMLP(16, gated=True, activation="silu", name="mlp")

    def build(self, input_shape: Any) -> None:
        self.table.build(input_shape)
        self.mlp.build((*input_shape, WIDTH))
        self.built = True

    def call(self, tokens: Any) -> Any:
        return self.table(self.mlp(self.table(tokens)), reverse=True)


def tied() -> keras.Model:
    model = Tied()
    model.build((None, LENGTH))
    return model


MODELS = {
    "dense": dense,
    "pair": pair,
    "transformer": lambda: transformer({}),
    "sequence parallel": lambda: transformer(
        {"sequence_parallel": True, "gather_output": False}, {"sequence_parallel": True, "input_is_parallel": True}
    ),
    "sequence parallel, grouped queries": lambda: transformer({"sequence_parallel": True, **GROUPED_QUERIES}, mask_zero=False),
    "grouped queries, gated": lambda: transformer(
        {"gated": True, "activation": "silu", "use_bias": False, **GROUPED_QUERIES}, mask_zero=False
    ),
    "tied": tied,
}


def data(name: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(11)
    rows = 6 * BATCH if name in WHOLE_BATCHES else ROWS
    if name in ("dense", "pair"):
        return rng.normal(size=(rows, LENGTH)), rng.integers(0, CLASSES, rows)
    tokens = rng.integers(0, VOCABULARY, (rows, LENGTH))
    labels = rng.integers(0, VOCABULARY, (rows, LENGTH))
    tokens[:, -2:] = 0  # what a mask masks
    return tokens, labels


def loss_of(name: str) -> keras.losses.Loss:
    if name in ("dense", "pair"):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return layers.VocabParallelCrossentropy(from_logits=True, ignore_class=3, label_smoothing=0.1)


def train(strategy: Any, name: str, optimizer: Any = None, infers: bool = False) -> dict[str, Any]:
    """Trains the 6 batches with `fit`, and if it `infers`, evaluates and predicts; returns what is to be equal on one device."""
    x, y = data(name)
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = MODELS[name]()
        optimizer = optimizer() if optimizer else keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(optimizer, loss_of(name), metrics=["sparse_categorical_accuracy"] if infers else None)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=name in WHOLE_BATCHES)
    losses, history = losses_of_fit(model, dataset)
    assert len(losses) == 6 and max(losses) > min(losses), "nothing was learnt: the comparison would be empty"
    found = {"losses": losses, "history": history, **state(model)}
    if infers:
        found["evaluate"] = [float(value) for value in model.evaluate(dataset, verbose=0)]
        found["predict"] = model.predict(x[:5], batch_size=5, verbose=0)
    return found


def custom_loop(strategy: Any, name: str) -> dict[str, Any]:
    """Trains the first 5 batches, which are whole, with `strategy.run` and a tape, and the first of them again."""
    x, y = data(name)
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = MODELS[name]()
        model.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.optimizer.build(model.trainable_variables)
    loss_function = loss_of(name)

    @tf.function
    def step(features: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        def on_rank(features: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_function(labels, model(features, training=True))
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return strategy.reduce("SUM", strategy.run(on_rank, args=(features, labels)), axis=None)

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True).repeat().take(6)
    losses = [float(step(*batch)) for batch in strategy.experimental_distribute_dataset(dataset)]
    return {"losses": losses, **state(model)}
