"""Programs in the style of keras.io's tutorials whose models have a `train_step` or a `compute_loss` of their own.

Random numbers come with the data, so that one device and several draw the same.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops

from tests.parity.comparison import state
from tests.programs.comparing import STAGES, assert_as_on_one_device
from tests.programs.fitting import BATCH, ROWS

pytestmark = pytest.mark.as_traced

FIT = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def rng():
    return np.random.default_rng(13)


def images(r, size=6):
    return r.uniform(size=(ROWS, size, size, 1)).astype("float32")


def slots_of(*optimizers):
    return [variable.numpy() for optimizer in optimizers for variable in optimizer.variables]


class VAE(keras.Model):
    """A sum over pixels and the Kullback-Leibler divergence, each a mean over the rows; three trackers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.encoder = keras.Sequential([layers.Conv2D(3, 3, strides=2, activation="relu"), layers.Flatten(), layers.Dense(4)])
        self.decoder = keras.Sequential([layers.Dense(36, activation="sigmoid"), layers.Reshape((6, 6, 1))])
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "reconstruction", "kl")]

    @property
    def metrics(self):
        return self.trackers

    def losses_of(self, image, noise):
        mean, log_variance = ops.split(self.encoder(image), 2, axis=1)
        decoded = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
        pixels = keras.losses.binary_crossentropy(image, decoded)
        reconstruction = ops.mean(ops.sum(pixels, axis=(1, 2)))
        kl = ops.mean(ops.sum(-0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance)), axis=1))
        return reconstruction + 0.1 * kl, reconstruction, kl

    def train_step(self, data):
        ((image, noise),) = data
        with tf.GradientTape() as tape:
            losses = self.losses_of(image, noise)
        gradients = tape.gradient(losses[0], self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for tracker, loss in zip(self.trackers, losses, strict=True):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}


def variational_autoencoder(strategy):
    r = rng()
    x = images(r), r.normal(size=(ROWS, 2)).astype("float32")
    with strategy.scope():
        model = VAE()
        model.compile(optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3))
    history = model.fit(x, epochs=2, **FIT).history
    return {"history": history, "weights": model.get_weights(), "slots": slots_of(model.optimizer)}


class GAN(keras.Model):
    """Two networks, two optimizers, two tapes: DCGAN."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.discriminator = keras.Sequential(
            [keras.Input((6, 6, 1)), layers.Conv2D(3, 3, strides=2), layers.LeakyReLU(), layers.Flatten(), layers.Dense(1)]
        )
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(36), layers.Reshape((6, 6, 1))])

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_metric, self.g_metric = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_metric, self.g_metric]

    def train_step(self, data):
        ((real, noise),) = data
        rows = ops.shape(real)[0]
        both = ops.concatenate([self.generator(noise), real], axis=0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((rows, 1)), self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {"d_loss": self.d_metric.result(), "g_loss": self.g_metric.result()}


def generative_adversarial_network(strategy):
    r = rng()
    x = images(r), r.normal(size=(ROWS, 4)).astype("float32")
    with strategy.scope():
        model = GAN()
        d, g = (keras.optimizers.Adam(0.01, beta_1=0.5, epsilon=1e-3) for _ in range(2))
        model.compile(d, g, keras.losses.BinaryCrossentropy(from_logits=True))
    history = model.fit(x, epochs=2, **FIT).history
    return {"history": history, "weights": model.get_weights(), "slots": slots_of(d, g)}


class WGAN(GAN):
    """With a gradient penalty: a gradient of the critic's output for its input, inside the critic's tape."""

    def train_step(self, data):
        ((real, noise, mix),) = data
        fake = self.generator(noise)
        with tf.GradientTape() as tape:
            mixed = real + ops.reshape(mix, (-1, 1, 1, 1)) * (fake - real)
            with tf.GradientTape() as inner:
                inner.watch(mixed)
                scores = self.discriminator(mixed, training=True)
            norms = ops.sqrt(ops.sum(inner.gradient(scores, mixed) ** 2, axis=(1, 2, 3)) + 1e-6)
            penalty = ops.mean((norms - 1.0) ** 2)
            d_loss = ops.mean(self.discriminator(fake)) - ops.mean(self.discriminator(real)) + 10.0 * penalty
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


def gradient_penalty(strategy):
    r = rng()
    x = images(r), r.normal(size=(ROWS, 4)).astype("float32"), r.uniform(size=ROWS).astype("float32")
    with strategy.scope():
        model = WGAN()
        d, g = keras.optimizers.RMSprop(0.005, epsilon=1e-3), keras.optimizers.RMSprop(0.005, epsilon=1e-3)
        model.compile(d, g, None)
    history = model.fit(x, epochs=2, **FIT).history
    return {"history": history, "weights": model.get_weights(), "slots": slots_of(d, g)}


class Distiller(keras.Model):
    """A student learns from a frozen teacher and from labels, in `compute_loss`."""

    def __init__(self, student, teacher, **kwargs):
        super().__init__(**kwargs)
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False

    def call(self, x, training=False):
        return self.student(x, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        hard = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        soft = ops.softmax(self.teacher(x, training=False) / 3.0)
        distilled = -ops.mean(ops.sum(soft * ops.log_softmax(y_pred / 3.0), axis=-1))
        return 0.3 * hard + 0.7 * distilled


def distillation(strategy):
    r = rng()
    x, y = r.normal(size=(ROWS, 5)).astype("float32"), r.integers(0, 3, size=ROWS)
    with strategy.scope():
        teacher = keras.Sequential([keras.Input((5,)), layers.Dense(8, "tanh"), layers.Dense(3)])
        student = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
        model = Distiller(student, teacher)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    history = model.fit(x, y, validation_data=(x[:9], y[:9]), epochs=2, **FIT).history
    return {"history": history, "predicted": model.predict(x, verbose=0), **state(model)}


class Diffusion(keras.Model):
    """Predicts noise, and keeps an average of its network, which the step itself moves."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.network = self.make()
        self.average = self.make()
        self.average.trainable = False

    @staticmethod
    def make():
        noisy, rate = keras.Input((6,)), keras.Input((1,))
        return keras.Model([noisy, rate], layers.Dense(6)(layers.Dense(8, "swish")(layers.Concatenate()([noisy, rate]))))

    def train_step(self, data):
        ((x, noise, rate),) = data
        with tf.GradientTape() as tape:
            predicted = self.network([rate * x + (1 - rate) * noise, rate], training=True)
            loss = self.loss(noise, predicted)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        for weight, average in zip(self.network.weights, self.average.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {"loss": loss}


def diffusion(strategy):
    r = rng()
    x = [r.normal(size=(ROWS, 6)).astype("float32") for _ in range(2)] + [r.uniform(size=(ROWS, 1)).astype("float32")]
    with strategy.scope():
        model = Diffusion()
        model.compile(keras.optimizers.AdamW(0.01, epsilon=1e-3), loss=keras.losses.MeanAbsoluteError())
    history = model.fit(tuple(x), epochs=2, **FIT).history
    return {"history": history, "weights": model.get_weights(), "slots": slots_of(model.optimizer)}


class Siamese(keras.Model):
    """A triplet loss on data that are not (x, y), by a network that is called three times."""

    def __init__(self, network, **kwargs):
        super().__init__(**kwargs)
        self.network = network
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, triplet):
        anchor, positive, negative = (self.network(part) for part in triplet)
        return ops.sum((anchor - positive) ** 2, -1), ops.sum((anchor - negative) ** 2, -1)

    def loss_of(self, data):
        near, far = self(data)
        return ops.maximum(near - far + 0.5, 0.0)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(self.loss_of(data))
        return {"loss": self.tracker.result()}


def triplets(strategy):
    """The tutorial's loss is one number for each row, whose gradient is that of their sum."""
    r = rng()
    rows = [r.normal(size=(ROWS, 5)).astype("float32") for _ in range(3)]
    dataset = tf.data.Dataset.from_tensor_slices(tuple(rows)).batch(BATCH)
    with strategy.scope():
        model = Siamese(keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(2)]))
        model.compile(optimizer=keras.optimizers.SGD(0.005, momentum=0.9))
    history = model.fit(dataset, validation_data=dataset, epochs=2, verbose=0).history
    return {"history": history, "weights": model.get_weights(), "slots": slots_of(model.optimizer)}


class Masked(keras.Model):
    """Masked language modelling: a Keras loss of one value per token, weighted by the mask, as the tutorial has it."""

    loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None, from_logits=True)
    tracker = None

    def train_step(self, data):
        features, labels, weights = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=labels, y_pred=self(features, training=True), sample_weight=weights)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    @property
    def metrics(self):
        return [self.tracker]


def masked_language_model(strategy):
    r = rng()
    x, y = r.integers(0, 7, size=(ROWS, 5)), r.integers(0, 7, size=(ROWS, 5))
    weights = r.integers(0, 2, size=(ROWS, 5)).astype("float32")
    with strategy.scope():
        inputs = keras.Input((5,), dtype="int64")
        hidden = layers.Embedding(7, 4)(inputs)
        hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(2, 2)(hidden, hidden))
        model = Masked(inputs, layers.Dense(7)(hidden))
        model.tracker = keras.metrics.Mean(name="loss")
        model.compile(keras.optimizers.SGD(0.1), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(x, y, sample_weight=weights, epochs=2, **FIT).history
    return {"history": history, **state(model)}


class Accumulating(keras.Model):
    """A `train_step` that clips by value, adds a penalty of the weights and returns Keras's own metrics."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred) + 1e-2 * sum(ops.sum(w**2) for w in self.trainable_weights)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def penalty_of_weights(strategy):
    r = rng()
    x, y = r.normal(size=(ROWS, 5)).astype("float32"), r.normal(size=(ROWS, 3)).astype("float32")
    with strategy.scope():
        inputs = keras.Input((5,))
        model = Accumulating(inputs, layers.Dense(3)(layers.Dense(4, "tanh")(inputs)))
        model.compile(keras.optimizers.Lion(0.01), loss="mse", metrics=["mae"])
    history = model.fit(x, y, epochs=2, **FIT).history
    return {"history": {k: v for k, v in history.items() if k == "loss"}, **state(model)}


def contrastive_pairs(strategy):
    """Two views through one encoder; pairs are compared row by row, as BYOL does, with a target network behind a stop."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = keras.Sequential([keras.Input((5,)), layers.Dense(6, "relu"), layers.Dense(4)])
            self.predictor = keras.Sequential([keras.Input((4,)), layers.Dense(4)])

        def call(self, views):
            return [self.predictor(self.encoder(view)) for view in views], [self.encoder(view) for view in views]

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            (p, q), (a, b) = y_pred
            one = keras.losses.cosine_similarity(p, ops.stop_gradient(b))
            return ops.mean(one) + ops.mean(keras.losses.cosine_similarity(q, ops.stop_gradient(a)))

    r = rng()
    views = tuple(r.normal(size=(ROWS, 5)).astype("float32") for _ in range(2))
    dataset = tf.data.Dataset.from_tensor_slices((views,)).batch(BATCH)
    with strategy.scope():
        model = Model()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    history = model.fit(dataset, epochs=2, verbose=0).history
    return {"history": history, "weights": model.get_weights(), "slots": slots_of(model.optimizer)}


PROGRAMS = [
    variational_autoencoder,
    generative_adversarial_network,
    gradient_penalty,
    distillation,
    diffusion,
    triplets,
    masked_language_model,
    penalty_of_weights,
    contrastive_pairs,
]


@pytest.mark.parametrize("program", [exhaustive(program) for program in PROGRAMS])
@pytest.mark.parametrize("zero_stage", STAGES)
def test_it_is_as_on_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage, rtol=1e-4)
