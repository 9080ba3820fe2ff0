"""Programs in the style of keras.io's and TensorFlow's examples of series, text, tables and recommendations."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops

from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device
from tests.programs.small_training import BATCH, ROWS, adam, fitted, integers, normal, sgd

pytestmark = pytest.mark.as_traced

WORDS = ("sharding", "splits", "weights", "over", "devices", "and", "gathers", "them")


def sentences(length=5, seed=4):
    rng = np.random.default_rng(seed)
    return np.array([" ".join(rng.choice(WORDS, rng.integers(1, length + 1))) for _ in range(ROWS)])


class GraphConvolution(layers.Layer):
    """Of a graph that is the same for all rows: the mean of each node's neighbours, beside the node itself."""

    def __init__(self, units, edges, nodes):
        super().__init__()
        self.units, self.edges, self.nodes = units, np.array(edges), nodes

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), initializer="glorot_uniform", name="kernel")

    def call(self, x):
        x = tf.transpose(x, [2, 0, 1, 3])  # nodes first
        neighbours = tf.math.unsorted_segment_mean(tf.gather(x, self.edges[1]), self.edges[0], self.nodes)
        joined = tf.concat([tf.matmul(x, self.kernel), tf.matmul(neighbours, self.kernel)], -1)
        return tf.nn.relu(tf.transpose(joined, [1, 2, 0, 3]))


def traffic(strategy):
    """Traffic forecasting: graph convolutions and an LSTM, the speed of every node for some steps."""
    nodes, steps = 3, 4
    with strategy.scope():
        speeds = keras.Input((steps, nodes, 1))
        hidden = GraphConvolution(4, [[0, 1, 1, 2, 0], [1, 0, 2, 1, 2]], nodes)(speeds)
        hidden = layers.Reshape((steps, nodes * 8))(hidden)
        model = keras.Model(speeds, layers.Dense(nodes)(layers.LSTM(6, activation="relu")(hidden)))
        model.compile(keras.optimizers.RMSprop(0.01, epsilon=1e-3), keras.losses.MeanSquaredError())
    series = np.random.default_rng(3).normal(size=(16, nodes, 1)).astype("float32")
    windows = [
        keras.utils.timeseries_dataset_from_array(part, part[steps:, :, 0], steps, batch_size=5) for part in (series, series[8:])
    ]
    stop = keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)
    history = model.fit(windows[0], validation_data=windows[1], epochs=2, verbose=0, callbacks=[stop]).history
    return history, state(model), model.predict(windows[1], verbose=0)


class Attention(layers.Layer):
    """Bahdanau's, with the weights returned."""

    def __init__(self, units):
        super().__init__()
        self.of_query, self.of_value, self.score = layers.Dense(units), layers.Dense(units), layers.Dense(1)

    def call(self, query, values, mask):
        score = self.score(tf.tanh(self.of_query(query)[:, None] + self.of_value(values)))[..., 0]
        weights = tf.nn.softmax(tf.where(mask, score, -1e9), axis=1)
        return tf.einsum("bt,btd->bd", weights, values), weights


class Translator(keras.Model):
    """TensorFlow's "neural machine translation with attention": a loop over the target's words, which are given to it."""

    def __init__(self):
        super().__init__()
        self.source, self.target = layers.Embedding(9, 5), layers.Embedding(7, 5)
        self.encoder, self.cell = layers.Bidirectional(layers.GRU(4, return_sequences=True)), layers.GRUCell(6)
        self.attention, self.head = Attention(4), layers.Dense(7)
        self.loss_tracker, self.accuracy = keras.metrics.Mean("loss"), keras.metrics.SparseCategoricalAccuracy("accuracy")

    @property
    def metrics(self):
        return [self.loss_tracker, self.accuracy]

    def call(self, inputs):
        words, given = inputs
        values, mask = self.encoder(self.source(words)), words > 0
        state, logits = tf.zeros([tf.shape(words)[0], 6]), []
        for number in range(given.shape[1]):
            context, _ = self.attention(state, values, mask)
            _, (state,) = self.cell(tf.concat([self.target(given[:, number]), context], -1), [state])
            logits.append(self.head(state))
        return tf.stack(logits, 1)

    def step(self, data, training):
        words, target = data
        known = tf.cast(target[:, 1:] > 0, tf.float32)
        with tf.GradientTape() as tape:
            logits = self((words, target[:, :-1]), training=training)
            of_word = tf.nn.sparse_softmax_cross_entropy_with_logits(target[:, 1:], logits) * known
            loss = tf.reduce_mean(tf.reduce_sum(of_word, 1))
        self.loss_tracker.update_state(loss)
        self.accuracy.update_state(target[:, 1:], logits, known)
        return tape, loss

    def train_step(self, data):
        tape, loss = self.step(data, True)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        self.step(data, False)
        return {m.name: m.result() for m in self.metrics}


def translation(strategy):
    with strategy.scope():
        model = Translator()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    source, target = integers(9, 5), integers(7, 4, seed=3)
    source[:, 0] = np.maximum(source[:, 0], 1)
    return fitted(model, source, target, validation_data=(source, target), validation_batch_size=6)


def raw_text(strategy):
    """Strings go into the model, which has the vocabulary; it is exported with it, and served as it is."""
    text, y = sentences(), integers(2)
    with strategy.scope():
        vectorize = layers.TextVectorization(max_tokens=9, output_sequence_length=6)
        vectorize.adapt(text)
        hidden = layers.Embedding(9, 5, mask_zero=True)(vectorize(words := keras.Input((), dtype="string")))
        hidden = layers.GlobalAveragePooling1D()(layers.Dropout(0.0)(hidden))
        model = keras.Model(words, layers.Dense(1, "sigmoid")(hidden))
        model.compile(
            sgd(), "binary_crossentropy", metrics=[keras.metrics.BinaryAccuracy(), keras.metrics.AUC(num_thresholds=20)]
        )
    data = tf.data.Dataset.from_tensor_slices((text, y)).batch(BATCH)
    history = model.fit(data, validation_data=data.take(1), epochs=2, verbose=0, class_weight={0: 0.7, 1: 1.8}).history
    return history, state(model), model.predict(tf.constant(text[:5]), verbose=0)


def padded_and_weighted(strategy):
    """Rows of unequal lengths, batches of unequal sizes, classes that weigh, tokens that are padding."""
    rng = np.random.default_rng(6)
    lengths = rng.integers(1, 7, ROWS)

    def rows():
        for number, length in enumerate(lengths):
            yield np.full(length, 1 + number % 6, "int32"), np.int32(number % 3)

    signature = (tf.TensorSpec((None,), tf.int32), tf.TensorSpec((), tf.int32))
    data = tf.data.Dataset.from_generator(rows, output_signature=signature)
    data = data.bucket_by_sequence_length(lambda x, _: tf.shape(x)[0], [3, 5], [5, 4, 3])
    # Else Keras counts, on one device, a step more at the end of each epoch.
    data = data.apply(tf.data.experimental.assert_cardinality(6))
    with strategy.scope():
        hidden = [layers.Embedding(7, 4, mask_zero=True), layers.Bidirectional(layers.GRU(3)), layers.Dense(3, "softmax")]
        model = keras.Sequential([keras.Input((None,), dtype="int32"), *hidden])
        model.compile(sgd(), "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    history = model.fit(data, epochs=2, verbose=0, class_weight={0: 1.0, 1: 2.0, 2: 0.3}).history
    return history, state(model), model.evaluate(data, verbose=0)


class Recommender(keras.Model):
    """Two towers with vocabularies of their own: rows are retrieved by a product, and rated by a network on both."""

    def __init__(self, users, films):
        super().__init__()
        self.user = keras.Sequential([layers.StringLookup(vocabulary=users), layers.Embedding(len(users) + 1, 4)])
        self.film = keras.Sequential([layers.StringLookup(vocabulary=films), layers.Embedding(len(films) + 1, 4)])
        self.rating = keras.Sequential([layers.Dense(6, "relu"), layers.Dense(1)])

    def call(self, x):
        user, film = self.user(x["user"]), self.film(x["film"])
        return {"rating": self.rating(ops.concatenate([user, film], 1)), "watched": ops.sum(user * film, 1, keepdims=True)}


def recommender(strategy):
    users, films = [f"user {number}" for number in range(5)], [f"film {number}" for number in range(6)]
    x = {"user": np.array(users)[integers(5)], "film": np.array(films)[integers(6, seed=2)]}
    y = {"rating": normal(1), "watched": integers(2, 1, seed=3).astype("float32")}
    with strategy.scope():
        model = Recommender(users, films)
        losses = {"rating": "mse", "watched": keras.losses.BinaryCrossentropy(from_logits=True)}
        metrics = {"rating": [keras.metrics.RootMeanSquaredError()]}
        model.compile(keras.optimizers.SGD(0.1), losses, loss_weights={"rating": 1.0, "watched": 0.5}, metrics=metrics)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    return model.fit(data, epochs=2, verbose=0).history, state(model), model.predict(data, verbose=0)


def features_of_a_table(strategy):
    """`keras.utils.FeatureSpace`: its preprocessing in the data, and a transformer on what is categorical."""
    table = {"age": normal(), "town": np.array(WORDS)[integers(8)], "level": integers(4, seed=2)}
    y = integers(2, seed=5)
    kinds = {"age": "float_normalized", "town": "string_categorical", "level": "integer_categorical"}
    space = keras.utils.FeatureSpace(kinds, output_mode="dict")
    data = tf.data.Dataset.from_tensor_slices((table, y)).batch(BATCH)
    space.adapt(data.map(lambda x, _: x))
    with strategy.scope():
        encoded = space.get_encoded_features()
        tokens = [layers.Reshape((1, 4))(layers.Dense(4)(encoded[name])) for name in ("town", "level")]
        tokens = layers.Concatenate(axis=1)(tokens)
        attended = layers.LayerNormalization()(layers.Add()([tokens, layers.MultiHeadAttention(2, 2)(tokens, tokens)]))
        joined = layers.Concatenate()([layers.Flatten()(attended), encoded["age"]])
        model = keras.Model(encoded, layers.Dense(1, "sigmoid")(joined))
        model.compile(adam(), "binary_crossentropy", metrics=["accuracy"])
    history = model.fit(data.map(lambda x, y: (space(x), y)), epochs=2, verbose=0).history
    return history, state(model)


class Translations(keras.Model):
    """TransE: entities of a graph are points, relations are the way between them; entities are put back on the sphere."""

    def __init__(self):
        super().__init__()
        self.entities = layers.Embedding(9, 4, embeddings_constraint=keras.constraints.UnitNorm(axis=1))
        self.relations = layers.Embedding(3, 4)

    def distance(self, triples):
        head, tail = self.entities(triples[:, 0]), self.entities(triples[:, 2])
        return ops.sqrt(ops.sum(ops.square(head + self.relations(triples[:, 1]) - tail), -1) + 1e-6)

    def call(self, inputs):
        return ops.stack([self.distance(inputs["true"]), self.distance(inputs["corrupted"])], 1)


def knowledge_graph(strategy):
    def ranking(_, distances):
        return ops.relu(0.5 + distances[:, 0] - distances[:, 1])

    true, corrupted = (np.stack([integers(9, seed=s), integers(3, seed=s + 1), integers(9, seed=s + 2)], 1) for s in (1, 5))
    with strategy.scope():
        model = Translations()
        model.compile(keras.optimizers.SGD(0.1), ranking)
    return fitted(model, {"true": true, "corrupted": corrupted}, np.zeros(ROWS, "float32"))


def skip_grams(strategy):
    """Word2vec: a word beside one word of its context and some that are none, as TensorFlow's tutorial has it."""

    class Word2Vec(keras.Model):
        def __init__(self):
            super().__init__()
            self.target, self.context = layers.Embedding(8, 5, name="target"), layers.Embedding(8, 5, name="context")

        def call(self, pair):
            target, context = pair
            return tf.einsum("be,bce->bc", self.target(tf.squeeze(target, 1)), self.context(context))

    with strategy.scope():
        model = Word2Vec()
        loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5, momentum=0.5), loss, metrics=["accuracy"])
    labels = np.tile(np.eye(4, dtype="float32")[0], (ROWS, 1))
    data = tf.data.Dataset.from_tensor_slices(((integers(8, 1), integers(8, 4, seed=2)), labels))
    data = data.batch(BATCH, drop_remainder=True).cache().prefetch(tf.data.AUTOTUNE)
    return model.fit(data, epochs=2, verbose=0).history, state(model)


class Tree(keras.Model):
    """A neural decision tree: a row goes to every leaf with some probability, and each leaf has its classes."""

    def __init__(self, depth, used):
        super().__init__()
        self.depth, self.leaves = depth, 2**depth
        self.used = np.eye(5, dtype="float32")[used]
        self.classes = self.add_weight(shape=(self.leaves, 3), initializer="random_normal", name="classes")
        self.decide = layers.Dense(self.leaves, "sigmoid")

    def call(self, x):
        decisions = self.decide(ops.matmul(x, ops.transpose(self.used)))
        decisions = ops.stack([decisions, 1 - decisions], 2)
        reached = ops.ones_like(x[:, :1, None])
        begin, end = 1, 2
        for level in range(self.depth):
            reached = ops.reshape(ops.tile(reached, (1, 1, 2)), (-1, 2**level, 2)) * decisions[:, begin:end]
            reached = ops.reshape(reached, (-1, 2 ** (level + 1), 1))
            begin, end = end, end + 2 ** (level + 1)
        return ops.matmul(ops.reshape(reached, (-1, self.leaves)), ops.softmax(self.classes))


def decision_forest(strategy):
    with strategy.scope():
        features = keras.Input((5,))
        hidden = layers.BatchNormalization(synchronized=True)(features)
        trees = [Tree(3, used)(hidden) for used in ([0, 1, 2], [2, 3, 4])]
        model = keras.Model(features, layers.Average()(trees))
        model.compile(adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return fitted(model, normal(5), integers(3))


def anomalies(strategy):
    """A series' autoencoder; the threshold is the largest error of what it was trained with."""
    with strategy.scope():
        down = [layers.Conv1D(5, 3, 2, "same", activation="relu"), layers.Dropout(0.0)]
        up = [layers.Conv1DTranspose(4, 3, 2, "same", activation="relu"), layers.Conv1DTranspose(1, 3, padding="same")]
        model = keras.Sequential([keras.Input((8, 1)), *down, *up])
        model.compile(adam(), "mse")
    x = normal(8, 1)
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, mode="min", start_from_epoch=1)
    found = fitted(model, x, x, validation_split=0.1, callbacks=[stop], epochs=3)
    errors = np.mean(np.abs(model.predict(x, verbose=0) - x), axis=1)
    return found, errors.max()


class Unpadded(keras.losses.Loss):
    """Named entities: of the words that are none of padding, the mean over a row's."""

    def call(self, y, found):
        known = ops.cast(y > 0, "float32")
        of_word = keras.losses.sparse_categorical_crossentropy(y, found) * known
        return ops.sum(of_word, 1) / ops.maximum(ops.sum(known, 1), 1.0)


class Block(layers.Layer):
    def __init__(self, size):
        super().__init__()
        self.attention, self.norms = layers.MultiHeadAttention(2, size // 2), [layers.LayerNormalization() for _ in range(2)]
        self.mlp = keras.Sequential([layers.Dense(2 * size, "relu"), layers.Dense(size)])

    def call(self, x, mask=None):
        allowed = None if mask is None else mask[:, None, :]
        x = self.norms[0](x + self.attention(x, x, attention_mask=allowed))
        return self.norms[1](x + self.mlp(x))


def named_entities(strategy):
    with strategy.scope():
        words = keras.Input((None,), dtype="int32")
        tokens = layers.Embedding(9, 6)(words)
        hidden = Block(6)(tokens, mask=ops.not_equal(words, 0))
        model = keras.Model(words, layers.Dense(4, "softmax")(hidden))
        model.compile(sgd(), Unpadded())
    lengths = integers(6, 1, low=1)
    x = np.where(np.arange(6) < lengths, integers(9, 6, low=1), 0)
    y = np.where(np.arange(6) < lengths, integers(4, 6, low=1, seed=3), 0)
    return fitted(model, x, y, epochs=1)


PROGRAMS = (
    traffic, translation, raw_text, padded_and_weighted, recommender, features_of_a_table, knowledge_graph, skip_grams,
    decision_forest, anomalies, named_entities,
)  # fmt: skip


@pytest.mark.parametrize(
    ("program", "zero_stage", "devices"),
    [exhaustive(program, stage, devices) for program in PROGRAMS for stage, devices in ((0, 2), (3, 4))],
)
def test_it_is_one_device(program, zero_stage, devices):
    assert_as_on_one_device(program, zero_stage, devices)
