"""The rest of Keras's machinery under the strategies: a table of small programs, each run on one device and on several."""

import csv
import functools
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers
from training import BATCH, CLASSES, FEATURES, ScaleAndShift, loss_function, mlp, one_device, small, strategy_for, vectors

from tests.parity.comparison import BatchLogs, assert_same_tree, state

pytestmark = pytest.mark.as_traced

X, Y = vectors(48)
EVEN = {"batch_size": BATCH, "verbose": 0, "shuffle": False}


def start(strategy):
    keras.utils.set_random_seed(3)
    return strategy.scope()


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def callbacks(strategy, folder):
    """Callbacks that watch `val_loss` and act on it, and those that write."""
    with start(strategy):
        model = small()
        model.compile(momentum(), loss_function(), metrics=["accuracy"])
    logs = BatchLogs()
    kinds = keras.callbacks
    plateau = kinds.ReduceLROnPlateau(factor=0.5, patience=1, min_delta=10.0)
    stopping = kinds.EarlyStopping(patience=2, min_delta=10.0, restore_best_weights=True)
    writers = [kinds.CSVLogger(folder / "log.csv"), kinds.TensorBoard(folder / "board")]
    watchers = [logs, plateau, stopping, kinds.TerminateOnNaN()]
    history = model.fit(X, Y, epochs=6, validation_data=(X[:24], Y[:24]), callbacks=watchers + writers, **EVEN)
    with open(folder / "log.csv", encoding="utf-8", newline="") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert len(rows) == len(history.history["loss"]) == 3, "EarlyStopping has not stopped"
    board = scalars(folder / "board")
    assert {"train/epoch_loss", "validation/epoch_accuracy"} <= set(board)
    return {"history": history.history, "csv": rows, "board": board, "batches": logs.train, **state(model)}


def scalars(folder: pathlib.Path) -> dict[str, list[float]]:
    """Returns the scalars that TensorBoard was given, in order."""
    found: dict[str, list[float]] = {}
    for path in sorted(folder.rglob("events*")):
        for record in tf.data.TFRecordDataset([str(path)]):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                if value.tag.startswith(("epoch_", "evaluation_")):
                    found.setdefault(f"{path.parent.name}/{value.tag}", []).append(float(tf.make_ndarray(value.tensor)))
    return dict(sorted(found.items()))


def not_a_number(strategy, folder):
    """The last example of the second batch is NaN, on one device of several: all must stop."""
    with start(strategy):
        model = small()
        model.compile(momentum(), loss_function())
    x = X.copy()
    x[2 * BATCH - 1] = np.nan
    logs = BatchLogs()
    model.fit(x, Y, callbacks=[logs, keras.callbacks.TerminateOnNaN()], **EVEN)
    assert len(logs.train) == 2
    return {"first": logs.train[0], "second is NaN": float(np.isnan(logs.train[1]["loss"]))}


class WithLosses(layers.Layer):
    """Adds losses of its output's examples and of its weight."""

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], 9), regularizer=keras.regularizers.L1L2(0.01, 0.01))

    def call(self, x):
        y = keras.ops.matmul(x, self.kernel)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(y)))
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(self.kernel)))
        return y


def added_losses(strategy, folder):
    with start(strategy):
        dense = layers.Dense(
            11,
            activation="tanh",
            kernel_regularizer="l2",
            bias_regularizer="l1",
            activity_regularizer=keras.regularizers.L2(0.1),
            kernel_constraint=keras.constraints.MaxNorm(0.7),
        )
        model = keras.Sequential([keras.Input((FEATURES,)), dense, WithLosses(), layers.Dense(CLASSES)])
        model.compile(momentum(), loss_function())
    logs = BatchLogs()
    history = model.fit(X, Y, callbacks=[logs], validation_data=(X[:24], Y[:24]), **EVEN)
    return {"history": history.history, "batches": logs.train, **state(model)}


class Distilled(keras.Model):
    """A training step of one's own, with a metric of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gap = keras.metrics.Mean(name="gap")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.gap.update_state(tf.reduce_max(y_pred, -1) - tf.reduce_min(y_pred, -1))
        for metric in self.metrics:
            if metric.name not in ("loss", "gap"):
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics if metric.name != "loss"} | {"loss": loss * 0 + 1}


def custom_train_step(strategy, folder):
    with start(strategy):
        inputs = keras.Input((FEATURES,))
        model = Distilled(inputs=inputs, outputs=layers.Dense(CLASSES)(ScaleAndShift()(inputs)))
        model.compile(momentum(), loss_function(), metrics=["accuracy"])
    logs = BatchLogs()
    history = model.fit(X, Y, callbacks=[logs], **EVEN)
    return {"gap": history.history["gap"], "accuracy": history.history["accuracy"], **state(model)}


def lora(strategy, folder):
    """Trains, then freezes the kernels and trains factors of low rank; their weights are saved merged."""
    found = {}
    with start(strategy):
        model = keras.Sequential(
            [
                keras.Input((9,), dtype="int32"),
                layers.Embedding(20, 10, name="embedding"),
                layers.Flatten(),
                layers.Dense(13, activation="tanh", name="hidden"),
                layers.Dense(CLASSES, name="head"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), loss_function())
    tokens = np.random.default_rng(5).integers(0, 20, size=(48, 9))
    found["before"] = model.fit(tokens, Y, **EVEN).history["loss"]
    kernel = model.get_layer("hidden").get_weights()[0]
    with strategy.scope():
        for name in ("embedding", "hidden"):
            model.get_layer(name).enable_lora(3)
        model.compile(momentum(), loss_function())
    found["after"] = model.fit(tokens, Y, epochs=2, **EVEN).history["loss"]
    trainable = [variable.path for variable in model.trainable_variables]
    assert sum("lora" in path for path in trainable) == 4 and "sequential/hidden/kernel" not in trainable
    np.testing.assert_array_equal(model.get_layer("hidden")._kernel.numpy(), kernel)
    model.save_weights(folder / "lora.weights.h5")
    with start(strategy):
        model.get_layer("hidden").lora_kernel_a.assign(np.zeros((90, 3)))
    model.load_weights(folder / "lora.weights.h5")
    return {**found, "reloaded": model.predict(tokens, verbose=0), **state(model)}


def frozen_and_thawed(strategy, folder):
    """Compiles anew after each change of `trainable`; the parameters that are frozen at stage 3 stay cut."""
    found = []
    with start(strategy):
        model = mlp()
    for frozen in (["hidden"], ["hidden", "scale"], []):
        with strategy.scope():
            for layer in model.layers:
                layer.trainable = layer.name not in frozen
            model.compile(momentum(), loss_function())
        before = model.get_layer("hidden").get_weights()
        found.append({"loss": model.fit(X, Y, **EVEN).history["loss"], **state(model)})
        changed = not np.array_equal(before[0], model.get_layer("hidden").get_weights()[0])
        assert changed == ("hidden" not in frozen)
    return found


def several_models(strategy, folder):
    """Two models take turns, and a smaller strategy in the same process."""
    other = strategy_for(2, 1) if strategy is not one_device() else strategy
    with start(strategy):
        first, second = small(), small()
        first.compile(keras.optimizers.Adam(0.02), loss_function())
        second.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss_function())
    with start(other):
        third = small()
        third.compile(momentum(), loss_function())
    found = []
    for rows in (slice(0, 24), slice(24, 48)):
        for model in (first, third, second):
            found.append(model.fit(X[rows], Y[rows], **EVEN).history["loss"])
    return {"losses": found, "states": [state(model) for model in (first, second, third)]}


class Ragged(keras.Model):
    """Rows of different lengths, as TensorFlow's ragged tensors."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(CLASSES)

    def build(self, shape):
        self.table = self.add_weight(name="table", shape=(20, 5))
        self.head.build((None, 5))

    def call(self, tokens):
        return self.head(tf.reduce_mean(tf.nn.embedding_lookup(self.table, tokens.to_tensor(shape=(None, 4))), axis=1))


def kinds_of_inputs(strategy, folder):
    """A dictionary of strings, booleans and numbers; a tuple; rows of different lengths."""
    rng = np.random.default_rng(1)
    words = rng.choice(np.array(["red", "green", "blue", "unknown"]), size=(48, 3))
    flags = rng.integers(0, 2, size=(48, 4)).astype(bool)
    with start(strategy):
        inputs = {
            "words": keras.Input((3,), dtype="string", name="words"),
            "flags": keras.Input((4,), dtype="bool", name="flags"),
            "numbers": keras.Input((FEATURES,), name="numbers"),
        }
        lookup = layers.StringLookup(vocabulary=["red", "green", "blue"])
        embedded = layers.Flatten()(layers.Embedding(4, 5)(lookup(inputs["words"])))
        joined = layers.Concatenate()([embedded, keras.ops.cast(inputs["flags"], "float32"), inputs["numbers"]])
        model = keras.Model(inputs, {"class": layers.Dense(CLASSES)(joined), "norm": layers.Dense(1)(joined)})
        # Not Adam: on one device Keras's squares the gradients of a word that occurs twice before it adds them.
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(sgd, {"class": loss_function(), "norm": "mse"}, metrics={"class": ["accuracy"]})
        left, right = keras.Input((FEATURES,)), keras.Input((4,), dtype="bool")
        outputs = layers.Dense(CLASSES)(layers.Concatenate()([left, keras.ops.cast(right, "float32")]))
        pair = keras.Model((left, right), outputs)
        pair.compile(keras.optimizers.SGD(0.1), loss_function())
        ragged = Ragged()
        ragged.compile(keras.optimizers.SGD(0.1), loss_function())
    x = {"words": words, "flags": flags, "numbers": X}
    y = {"class": Y, "norm": X[:, :1]}
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    found = {"dictionary": model.fit(dataset, verbose=0).history, "predicted": model.predict(dataset, verbose=0), **state(model)}
    found["tuple"] = pair.fit((X, flags), Y, **EVEN).history["loss"]
    lengths = rng.integers(1, 5, size=48)
    rows = tf.RaggedTensor.from_row_lengths(rng.integers(0, 20, size=lengths.sum()), lengths)
    found["ragged"] = ragged.fit(tf.data.Dataset.from_tensor_slices((rows, Y)).batch(BATCH), verbose=0).history["loss"]
    found["ragged weights"] = ragged.get_weights()
    return found


CASES = {
    "callbacks": callbacks,
    "not_a_number": not_a_number,
    "added_losses": added_losses,
    "custom_train_step": custom_train_step,
    "lora": lora,
    "frozen_and_thawed": frozen_and_thawed,
    "several_models": several_models,
    "kinds_of_inputs": kinds_of_inputs,
}


LONG = ("callbacks", "lora", "frozen_and_thawed", "several_models", "kinds_of_inputs")


def _cases():
    """Every program with stage 3 and with one of the others, in turns, which is exhaustive for the long ones.

    What tests/programs/ and tests/strategy/ have more of, callbacks, freezing and several models, is exhaustive altogether.
    """
    for place, name in enumerate(CASES):
        case = name, 3, 2 if name in LONG else 3
        yield exhaustive(*case) if name in ("callbacks", "frozen_and_thawed", "several_models") else case
        yield exhaustive(name, place % 3, 2) if name in LONG else (name, place % 3, 2)


@functools.cache
def on_one_device(name, folder):
    return CASES[name](one_device(), folder)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("name", "zero_stage", "devices"), list(_cases()))
def test_parity(name, zero_stage, devices, tmp_path, tmp_path_factory):
    expected = on_one_device(name, tmp_path_factory.getbasetemp())
    assert_same_tree(CASES[name](strategy_for(devices, zero_stage), tmp_path), expected, name)
