"""More kinds of programs, in the style of keras.io's examples: vision, text, speech, generative models, tables, control."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops

from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device

pytestmark = pytest.mark.as_traced

ROWS, BATCH, FEATURES = 22, 8, 6  # the last batch has 6 rows


def normal(*shape, seed=11):
    return np.random.default_rng(seed).normal(size=(ROWS, *shape)).astype("float32")


def integers(high, *shape, low=0, seed=7):
    return np.random.default_rng(seed).integers(low, high, (ROWS, *shape)).astype("int32")


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam():
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def fitted(model, *data, **arguments):
    arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": 2} | arguments
    return {"history": model.fit(*data, **arguments).history, **state(model)}


def segmentation(strategy):
    """A U-Net; a weight for each pixel, and an IoU that counts it."""
    with strategy.scope():
        image = keras.Input((12, 12, 1))
        down = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
        low = layers.SeparableConv2D(6, 3, padding="same", activation="relu")(layers.MaxPool2D()(down))
        up = layers.Conv2DTranspose(4, 3, padding="same")(layers.UpSampling2D()(low))
        classes = layers.Conv2D(3, 1, activation="softmax")(layers.Concatenate()([up, down]))
        model = keras.Model(image, classes)
        metrics = ["accuracy", keras.metrics.MeanIoU(3, sparse_y_pred=False)]
        model.compile(sgd(), "sparse_categorical_crossentropy", weighted_metrics=metrics)
    weights = np.abs(normal(12, 12, seed=3))
    return fitted(model, normal(12, 12, 1), integers(3, 12, 12), sample_weight=weights, epochs=1, validation_split=0.3)


class Detection(keras.losses.Loss):
    """RetinaNet's: of each image, divided by its number of positive anchors."""

    def __init__(self):
        super().__init__(reduction="none", name="detection")

    def call(self, y, found):
        positive = tf.cast(y[..., 0] > 0.5, tf.float32)
        of_class = tf.nn.sigmoid_cross_entropy_with_logits(positive, found[..., 0])
        of_box = positive * tf.reduce_sum(tf.abs(y[..., 1:] - found[..., 1:]), -1)
        return tf.reduce_sum(of_class + of_box, -1) / tf.maximum(tf.reduce_sum(positive, -1), 1.0)


def detection(strategy):
    with strategy.scope():
        anchors = [layers.Conv2D(4, 3, 4, "same", activation="relu"), layers.Conv2D(5, 1), layers.Reshape((9, 5))]
        model = keras.Sequential([keras.Input((12, 12, 1)), *anchors])
        model.compile(sgd(), Detection())
    return fitted(model, normal(12, 12, 1), normal(9, 5, seed=2))


def generated_text(strategy):
    """A small GPT with two outputs, of which one has no loss, and a callback that writes text."""
    written = []

    class Write(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            text = [1, 2, 3]
            while len(text) < FEATURES:
                logits, _ = self.model.predict(np.array([text + [0] * (FEATURES - len(text))]), verbose=0)
                text.append(int(logits[0, len(text) - 1].argmax()))
            written.append(text)

    with strategy.scope():
        ids = keras.Input((FEATURES,), dtype="int32")
        x = layers.Embedding(11, 8)(ids) + layers.Embedding(FEATURES, 8)(tf.range(FEATURES))
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True))
        model = keras.Model(ids, [layers.Dense(11)(x), x])
        model.compile(sgd(), loss=[keras.losses.SparseCategoricalCrossentropy(from_logits=True), None])
    tokens = integers(11, FEATURES, low=1)
    return {**fitted(model, tokens, np.roll(tokens, -1, 1), callbacks=[Write()]), "written": np.array(written)}


def translation(strategy):
    """Teacher forcing: an encoder's last states are a decoder's first; models for inference are cut out."""
    with strategy.scope():
        source, target = keras.Input((None,)), keras.Input((None,))
        *_, hidden, cell = layers.LSTM(6, return_state=True)(layers.Embedding(11, 5, mask_zero=True)(source))
        embedded = layers.Embedding(11, 5, mask_zero=True)(target)
        outputs, *_ = layers.LSTM(6, return_sequences=True, return_state=True)(embedded, initial_state=[hidden, cell])
        model = keras.Model([source, target], layers.Dense(11, activation="softmax")(outputs))
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = integers(11, FEATURES), integers(11, FEATURES, seed=8)
    found = fitted(model, [x, y], np.roll(y, -1, 1), epochs=1, validation_data=([x[:5], y[:5]], y[:5]))
    return {**found, "states": keras.Model(source, [hidden, cell]).predict(x[:3], verbose=0)}


def speech(strategy):
    with strategy.scope():
        recurrent = layers.Bidirectional(layers.GRU(4, return_sequences=True))
        model = keras.Sequential([keras.Input((10, 4)), recurrent, layers.Dense(6)])
        model.compile(adam(), keras.losses.CTC())
    found = fitted(model, normal(10, 4), integers(5, 3, low=1), epochs=1)
    logits = model.predict(normal(10, 4), verbose=0)
    decoded = ops.ctc_decode(logits, np.full(ROWS, 10), strategy="greedy")
    return {**found, "scores": decoded[1].numpy()}


class Net(keras.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__([keras.Input((inputs,)), layers.Dense(5, "tanh"), layers.Dense(outputs)])


class Stepping(keras.Model):
    """A model of several nets, each with an optimizer: `minimized(tape, loss, name)` is one step of one of them."""

    def __init__(self, make_optimizer, **nets):
        super().__init__()
        self.names = list(nets)
        for name, net in nets.items():
            setattr(self, name, net)
        self.optimizers = {name: make_optimizer() for name in nets}

    def minimized(self, tape, loss, name):
        weights = getattr(self, name).trainable_variables
        self.optimizers[name].apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


class Wasserstein(Stepping):
    """WGAN-GP: two steps of the critic, with a penalty of the gradient by its inputs, and one of the generator."""

    def train_step(self, data):
        x, noise, mix = data[0]
        for _ in range(2):
            with tf.GradientTape() as tape:
                made = self.generator(noise, training=True)
                between = x + mix * (made - x)
                with tf.GradientTape() as inner:
                    inner.watch(between)
                    score = self.critic(between, training=True)
                norm = tf.sqrt(tf.reduce_sum(tf.square(inner.gradient(score, between)), axis=1))
                penalty = tf.reduce_mean((norm - 1.0) ** 2)
                loss = tf.reduce_mean(self.critic(made)) - tf.reduce_mean(self.critic(x)) + 10 * penalty
            self.minimized(tape, loss, "critic")
        with tf.GradientTape() as tape:
            of_generator = -tf.reduce_mean(self.critic(self.generator(noise, training=True)))
        self.minimized(tape, of_generator, "generator")
        return {"critic": loss, "generator": of_generator, "penalty": penalty}


def wasserstein(strategy):
    with strategy.scope():
        model = Wasserstein(adam, critic=Net(FEATURES, 1), generator=Net(4, FEATURES))
        model.compile()
    data = (normal(FEATURES), normal(4, seed=3), np.abs(np.tanh(normal(1, seed=4))))
    history = model.fit(data, batch_size=BATCH, shuffle=False, verbose=0).history
    return {"history": history, "weights": model.get_weights()}


class Cycle(Stepping):
    """CycleGAN: four nets, four optimizers, one persistent tape, Keras losses called directly."""

    def train_step(self, data):
        a, b = data
        near, square = keras.losses.MeanAbsoluteError(), keras.losses.MeanSquaredError()
        with tf.GradientTape(persistent=True) as tape:
            to_b, to_a = self.to_b(a), self.to_a(b)
            judged_a, judged_b = self.judge_a(to_a), self.judge_b(to_b)
            losses = {
                "to_b": square(tf.ones_like(judged_b), judged_b) + 10 * near(b, self.to_b(to_a)) + 5 * near(b, self.to_b(b)),
                "to_a": square(tf.ones_like(judged_a), judged_a) + 10 * near(a, self.to_a(to_b)) + 5 * near(a, self.to_a(a)),
                "judge_a": square(tf.ones_like(judged_a), self.judge_a(a)) + square(tf.zeros_like(judged_a), judged_a),
                "judge_b": square(tf.ones_like(judged_b), self.judge_b(b)) + square(tf.zeros_like(judged_b), judged_b),
            }
        for name, loss in losses.items():
            self.minimized(tape, loss, name)
        return losses


def cycle(strategy):
    with strategy.scope():
        nets = {"to_a": FEATURES, "to_b": FEATURES, "judge_a": 1, "judge_b": 1}
        model = Cycle(adam, **{name: Net(FEATURES, units) for name, units in nets.items()})
        model.compile()
    data = tf.data.Dataset.from_tensor_slices((normal(FEATURES, seed=1), normal(FEATURES, seed=2))).batch(BATCH)
    return {"history": model.fit(data, verbose=0).history, "weights": model.get_weights()}


class Codebook(layers.Layer):
    """VQ-VAE: the codebook is an average of the rows that chose each of its columns; gradients go straight through."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(shape[-1], 7), initializer="uniform", trainable=False)
        self.counts = self.add_weight(shape=(7,), initializer="ones", trainable=False)
        self.sums = self.add_weight(shape=(shape[-1], 7), initializer="uniform", trainable=False)

    def call(self, x, training=False):
        codes = tf.convert_to_tensor(self.codes)
        distances = tf.reduce_sum(x**2, 1, keepdims=True) + tf.reduce_sum(codes**2, 0) - 2 * x @ codes
        chosen = tf.one_hot(tf.argmin(distances, 1), 7)
        nearest = tf.matmul(chosen, codes, transpose_b=True)
        if training:
            self.counts.assign(0.9 * self.counts + 0.1 * tf.reduce_sum(chosen, 0))
            self.sums.assign(0.9 * self.sums + 0.1 * tf.matmul(x, chosen, transpose_a=True))
            self.codes.assign(self.sums / self.counts)
        self.add_loss(0.25 * tf.reduce_mean((tf.stop_gradient(nearest) - x) ** 2))
        return x + tf.stop_gradient(nearest - x)


def codebook(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(4), Codebook(), layers.Dense(3)])
        model.compile(sgd(), "mse")
    return fitted(model, normal(FEATURES), normal(3, seed=2))


def mixed_table(strategy):
    """Wide and deep with crosses: numbers and strings in a dictionary, a vocabulary in the model."""
    with strategy.scope():
        number, word = keras.Input((1,), name="number"), keras.Input((1,), name="word", dtype="string")
        index = layers.StringLookup(vocabulary=["x", "y", "z"])(word)
        first = layers.concatenate([number, layers.Flatten()(layers.Embedding(4, 3)(index))])
        crossed = first
        for _ in range(2):
            crossed = first * layers.Dense(4)(crossed) + crossed
        deep = layers.BatchNormalization(synchronized=True)(layers.Dense(4, "relu")(first))
        wide = layers.CategoryEncoding(4, output_mode="one_hot")(index)
        classes = layers.Dense(2, activation="softmax")(layers.concatenate([crossed, deep, wide]))
        model = keras.Model({"number": number, "word": word}, classes)
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    words = np.array(["x", "y", "z"])[integers(3, 1)]
    data = tf.data.Dataset.from_tensor_slices(({"number": normal(1), "word": words}, integers(2, seed=9))).batch(BATCH)
    history = model.fit(data, epochs=2, verbose=0).history
    return {"history": history, "predicted": model.predict(data, verbose=0), **state(model)}


class Hypernetwork(layers.Layer):
    """Makes each row's own weights."""

    def __init__(self):
        super().__init__()
        self.kernels, self.biases = layers.Dense(FEATURES * 3), layers.Dense(3)

    def call(self, x, task):
        kernels = ops.reshape(self.kernels(task), (-1, FEATURES, 3))
        return ops.squeeze(ops.matmul(x[:, None], kernels), 1) + self.biases(task)


def hypernetwork(strategy):
    with strategy.scope():
        x, task = keras.Input((FEATURES,)), keras.Input((FEATURES,))
        model = keras.Model([x, task], Hypernetwork()(x, task))
        model.compile(sgd(), "mse")
    return fitted(model, [normal(FEATURES), normal(FEATURES, seed=4)], normal(3, seed=2))


def surgery(strategy):
    """A head is taken off, the rest frozen, layers added outside `scope()`; a clone gets the weights, and thaws."""
    x, y = normal(FEATURES), normal(3, seed=2)
    with strategy.scope():
        model = Net(FEATURES, 3)
        model.compile(sgd(), "mse")
    before = fitted(model, x, y, epochs=1)
    model.pop()
    model.trainable = False
    model.add(layers.Dense(4, "relu"))
    model.add(layers.Dense(2))
    model.compile(adam(), "mae")
    after = fitted(model, x, y[:, :2], epochs=1)
    with strategy.scope():
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        clone.trainable = True
        clone.compile(keras.optimizers.RMSprop(0.01, epsilon=1e-3), "mse")
    features = keras.Model(clone.inputs, clone.layers[-2].output)
    return [before, after, fitted(clone, x, y[:, :2], epochs=1), features.predict(x, verbose=0)]


def quality(strategy):
    """Deep Q-learning: a target net that gets the other's weights between steps, and eager calls that choose."""
    with strategy.scope():
        net, target = Net(FEATURES, 3), Net(FEATURES, 3)
        optimizer, huber = keras.optimizers.Adam(0.01, clipnorm=1.0, epsilon=1e-3), keras.losses.Huber()
    target.set_weights(net.get_weights())

    def on_rank(x, action, reward, following):
        wanted = reward + 0.9 * tf.reduce_max(target(following), 1)
        with tf.GradientTape() as tape:
            loss = huber(wanted, tf.reduce_sum(net(x) * tf.one_hot(action, 3), 1))
        weights = net.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    @tf.function
    def step(batch):
        return strategy.reduce("SUM", strategy.run(on_rank, batch), axis=None)

    data = (normal(FEATURES), integers(3), normal(seed=3), normal(FEATURES, seed=5))
    found = []
    for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(data).batch(BATCH).repeat(2)):
        found += [float(step(batch)), net(data[0][:1]).numpy()]
        target.set_weights(net.get_weights())
    return found, net.get_weights(), [variable.numpy() for variable in optimizer.variables]


PROGRAMS = (
    segmentation, detection, generated_text, translation, speech, wasserstein, cycle, codebook, mixed_table, hypernetwork,
    surgery, quality,
)  # fmt: skip


@pytest.mark.parametrize(("program", "zero_stage"), [exhaustive(program, stage) for program in PROGRAMS for stage in (0, 3)])
def test_it_is_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)
