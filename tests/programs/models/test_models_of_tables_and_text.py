"""Programs in the style of keras.io's tutorials on tables, time series, text and graphs, through `fit` and its callbacks."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops

from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import SHARDED, assert_as_on_one_device
from tests.programs.fitting import BATCH, ROWS, regression, tokens

pytestmark = pytest.mark.as_traced

FIT = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def rng():
    return np.random.default_rng(11)


def table_of_features(strategy):
    """A table with numbers, categories and strings, each encoded by a preprocessing layer of its own."""
    r = rng()
    x = {
        "age": r.normal(40, 9, size=(ROWS, 1)).astype("float32"),
        "job": r.choice(["cook", "smith", "clerk"], size=(ROWS, 1)),
        "city": r.integers(0, 5, size=(ROWS, 1)),
    }
    y = r.integers(0, 2, size=(ROWS, 1)).astype("float32")
    normalization = layers.Normalization()
    normalization.adapt(x["age"])
    lookup = layers.StringLookup(output_mode="one_hot")
    lookup.adapt(x["job"])
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    dataset = dataset.map(lambda x, y: ({**x, "age": normalization(x["age"]), "job": lookup(x["job"])}, y))
    with strategy.scope():
        inputs = {
            "age": keras.Input((1,), name="age"),
            "job": keras.Input((lookup.vocabulary_size(),), name="job"),
            "city": keras.Input((1,), dtype="int32", name="city"),
        }
        city = layers.Flatten()(layers.Embedding(5, 2)(inputs["city"]))
        merged = layers.Concatenate()([inputs["age"], inputs["job"], city])
        outputs = layers.Dense(1, activation="sigmoid")(layers.Dense(6, activation="relu")(merged))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC()])
    model.optimizer.learning_rate = 0.05
    history = model.fit(dataset, epochs=2, verbose=0).history
    return {"history": history, "predicted": model.predict(dataset, verbose=0), **state(model)}


def imbalanced_classes(strategy):
    """Credit card fraud: class weights, precision and recall, the best weights restored."""
    r = rng()
    x, y = r.normal(size=(ROWS, 6)).astype("float32"), (r.uniform(size=(ROWS, 1)) < 0.3).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(1, "sigmoid")])
        metrics = [keras.metrics.Precision(), keras.metrics.Recall(), keras.metrics.FalseNegatives()]
        model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=metrics)
    stopping = keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)
    fitted = model.fit(
        x, y, class_weight={0: 0.5, 1: 2.0}, validation_split=0.25, epochs=4, callbacks=[stopping], **FIT
    )  # fmt: skip
    return {"history": list(fitted.history.values()), "weights": model.get_weights()}


def timeseries(strategy):
    """Weather forecast: windows of a long series, an LSTM, a learning rate that follows the plateau."""
    series = np.sin(np.arange(60) / 5).astype("float32")[:, None]
    windows = keras.utils.timeseries_dataset_from_array(series[:-6], series[6:], sequence_length=6, batch_size=7)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6, 1)), layers.LSTM(4), layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.02), "mse")
    logs = BatchLogs()
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=1.0)
    model.fit(windows, epochs=3, callbacks=[plateau, logs], verbose=0)
    return {"batches": logs.train, "rate": float(model.optimizer.learning_rate.numpy()), **state(model)}


class TransformerBlock(layers.Layer):
    """As the tutorial "text classification with transformer" has it: layers made in `__init__`, built by their first call."""

    def __init__(self, width, heads, hidden, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(heads, width)
        self.feed = keras.Sequential([layers.Dense(hidden, activation="relu"), layers.Dense(width)])
        self.first, self.second = layers.LayerNormalization(epsilon=1e-6), layers.LayerNormalization(epsilon=1e-6)

    def call(self, x):
        x = self.first(x + self.attention(x, x))
        return self.second(x + self.feed(x))


class TokenAndPosition(layers.Layer):
    def __init__(self, length, vocabulary, width, **kwargs):
        super().__init__(**kwargs)
        self.tokens, self.positions = layers.Embedding(vocabulary, width), layers.Embedding(length, width)

    def call(self, ids):
        return self.tokens(ids) + self.positions(ops.arange(ops.shape(ids)[-1]))


def text_classifier(strategy):
    ids, _ = tokens(rng())
    y = rng().integers(0, 2, size=ROWS)
    with strategy.scope():
        x = keras.Input((5,), dtype="int32")
        hidden = TransformerBlock(4, 2, 6)(TokenAndPosition(5, 11, 4)(x))
        outputs = layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling1D()(hidden))
        model = keras.Model(x, outputs)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(ids, y, validation_data=(ids[:9], y[:9]), epochs=2, **FIT).history
    return {"history": history, **state(model)}


def translation(strategy):
    """A sequence-to-sequence GRU with teacher forcing, masked padding and weights of the tokens."""
    r = rng()
    source, _ = tokens(r)
    target, _ = tokens(r, length=6)
    with strategy.scope():
        encoder, decoder = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
        embedding = layers.Embedding(11, 4, mask_zero=True)
        context = layers.Bidirectional(layers.GRU(3), merge_mode="sum")(embedding(encoder))
        hidden = layers.GRU(3, return_sequences=True)(embedding(decoder), initial_state=context)
        model = keras.Model([encoder, decoder], layers.Dense(11, activation="softmax")(hidden))
        model.compile(keras.optimizers.SGD(0.2), "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    weights = (target[:, 1:] != 0).astype("float32")
    history = model.fit(
        [source, target[:, :-1]], target[:, 1:], sample_weight=weights, epochs=2, **FIT
    ).history  # fmt: skip
    return {"history": history, **state(model)}


def seq2seq_with_dataset(strategy):
    """Batches padded to their own longest row: every batch has another shape."""
    r = rng()

    def rows():
        for _ in range(ROWS):
            n = int(r.integers(2, 7))
            yield r.integers(1, 9, size=n), np.float32(n)

    spec = (tf.TensorSpec((None,), tf.int64), tf.TensorSpec((), tf.float32))
    examples = list(rows())
    dataset = tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=spec).padded_batch(6)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((None,), dtype="int64"), layers.Embedding(9, 4, mask_zero=True), layers.GRU(3), layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
    # Without `iterations`: on one device Keras's step counts one when it finds that a dataset of unknown length has ended.
    return {"history": model.fit(dataset, epochs=2, verbose=0).history, "weights": model.get_weights()}


class GraphLayer(layers.Layer):
    """A node's state is a product with its neighbours' mean: `segment_sum` over a batch of small graphs of equal size."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shapes):
        self.kernel = self.add_weight(shape=(shapes[0][-1], self.units), name="kernel")

    def call(self, inputs):
        nodes, adjacency = inputs
        return ops.relu(ops.matmul(adjacency, nodes) @ self.kernel)


def graph_network(strategy):
    r = rng()
    nodes = r.normal(size=(ROWS, 4, 3)).astype("float32")
    adjacency = r.integers(0, 2, size=(ROWS, 4, 4)).astype("float32")
    y = r.normal(size=(ROWS, 1)).astype("float32")
    with strategy.scope():
        a, b = keras.Input((4, 3)), keras.Input((4, 4))
        hidden = GraphLayer(4)([GraphLayer(5)([a, b]), b])
        model = keras.Model([a, b], layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))
        model.compile(keras.optimizers.Nadam(0.01, epsilon=1e-3), "mse")
    return {"history": model.fit([nodes, adjacency], y, epochs=2, **FIT).history, **state(model)}


class MixtureOfExperts(layers.Layer):
    """Experts weighted by a gate, with a loss of the gate's balance, which the layer adds."""

    def __init__(self, experts, units, **kwargs):
        super().__init__(**kwargs)
        self.gate = layers.Dense(experts, activation="softmax")
        self.experts = [layers.Dense(units, activation="relu") for _ in range(experts)]

    def call(self, x):
        gate = self.gate(x)
        self.add_loss(0.1 * ops.mean(ops.sum(gate**2, axis=-1)))
        return sum(gate[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def mixture_of_experts(strategy):
    x, y = regression(rng(), 5)
    with strategy.scope():
        inputs = keras.Input((5,))
        model = keras.Model(inputs, layers.Dense(3)(MixtureOfExperts(3, 4)(inputs)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return {"history": model.fit(x, y, epochs=2, **FIT).history, **state(model)}


def several_tasks(strategy):
    """Two outputs with losses, weights of the losses and metrics of their own; one has sample weights."""
    r = rng()
    x, y = regression(r, 6)
    z, w = r.integers(0, 4, size=ROWS), r.uniform(0.5, 1.5, size=ROWS).astype("float32")
    with strategy.scope():
        inputs = keras.Input((6,))
        trunk = layers.Dense(8, activation="tanh")(inputs)
        outputs = {"number": layers.Dense(3, name="number")(trunk), "kind": layers.Dense(4, name="kind")(trunk)}
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.5),
            loss={"number": "huber", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
            loss_weights={"number": 0.3, "kind": 1.7},
            metrics={"kind": ["accuracy"], "number": ["mse"]},
        )
    weights = {"number": np.ones_like(w), "kind": w}
    history = model.fit(x, {"number": y, "kind": z}, sample_weight=weights, epochs=2, **FIT).history
    return {"history": history, **state(model)}


def quantiles(strategy):
    """A loss function of one's own, one value per row, and `r2` as a metric."""

    def pinball(y, predicted):
        error = y - predicted
        return ops.mean(ops.maximum(0.9 * error, -0.1 * error), axis=-1)

    x, y = regression(rng(), 5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(6, "selu"), layers.Dense(3)])
        model.compile(keras.optimizers.Adagrad(0.05), pinball, metrics=[keras.metrics.R2Score()])
    return {"history": model.fit(x, y, epochs=2, **FIT).history, **state(model)}


def wide_and_deep(strategy):
    """Crossed and hashed features beside a deep part, and `MultiOptimizer`-like schedules of one optimizer."""
    r = rng()
    a, b = r.integers(0, 50, size=(ROWS, 1)), r.integers(0, 50, size=(ROWS, 1))
    x, y = regression(r, 4, targets=1)
    with strategy.scope():
        one, two, deep = keras.Input((1,), dtype="int64"), keras.Input((1,), dtype="int64"), keras.Input((4,))
        hashed = layers.Concatenate()(
            [layers.Hashing(8, output_mode="one_hot")(one), layers.Hashing(8, output_mode="one_hot")(two)]
        )
        outputs = layers.Add()([layers.Dense(1)(hashed), layers.Dense(1)(layers.Dense(5, "relu")(deep))])
        model = keras.Model([one, two, deep], outputs)
        schedule = keras.optimizers.schedules.CosineDecay(0.05, 6, warmup_target=0.1, warmup_steps=2)
        model.compile(keras.optimizers.Ftrl(schedule), "mse")
    return {"history": model.fit([a, b, x], y, epochs=2, **FIT).history, **state(model)}


def many_callbacks(strategy):
    """What callbacks are told and do: schedules, custom ones that read and write the model, a stop in the middle."""

    class Reading(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append([float(logs["loss"]), float(np.sum(self.model.layers[0].get_weights()[0]))])

        def on_epoch_end(self, epoch, logs=None):
            kernel, bias = self.model.layers[0].get_weights()
            self.model.layers[0].set_weights([kernel * 0.9, bias])
            self.seen.append(list(self.model.predict(x[:3], verbose=0)[0]))
            if epoch == 1:
                self.model.stop_training = True

    x, y = regression(rng(), 5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    reading = Reading()
    rate = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    history = model.fit(x, y, epochs=5, callbacks=[reading, rate, keras.callbacks.History()], **FIT).history
    return {"seen": reading.seen, "history": history, **state(model)}


def generators_and_sequences(strategy):
    """Data from a `PyDataset`, and from a Python generator with `steps_per_epoch`."""
    x, y = regression(rng(), 5)

    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            part = slice(index * BATCH, (index + 1) * BATCH)
            return x[part], y[part]

    def forever():
        while True:
            for start in range(0, 16, 8):
                yield x[start : start + 8], y[start : start + 8]

    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.Adamax(0.05), "mse")
    first = model.fit(Rows(), epochs=1, shuffle=False, verbose=0).history
    second = model.fit(forever(), steps_per_epoch=2, epochs=2, verbose=0).history
    return {"first": first, "second": second, "evaluated": model.evaluate(Rows(), verbose=0), **state(model)}


def batch_by_batch(strategy):
    """`train_on_batch`, `test_on_batch`, `predict_on_batch`, as a loop of one's own around Keras's functions."""
    x, y = regression(rng(), 5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    losses = [float(model.train_on_batch(x[i : i + 8], y[i : i + 8])) for i in (0, 8, 0, 8)]
    return {"losses": losses, "tested": float(model.test_on_batch(x[:8], y[:8])), "predicted": model.predict_on_batch(x[:5])}


PROGRAMS = [
    table_of_features,
    imbalanced_classes,
    timeseries,
    text_classifier,
    translation,
    seq2seq_with_dataset,
    graph_network,
    mixture_of_experts,
    several_tasks,
    quantiles,
    wide_and_deep,
    many_callbacks,
    generators_and_sequences,
    batch_by_batch,
]


@pytest.mark.parametrize("program", [p if p is several_tasks else exhaustive(p) for p in PROGRAMS])
@pytest.mark.parametrize("zero_stage", SHARDED)
def test_it_is_as_on_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage, rtol=1e-4)
