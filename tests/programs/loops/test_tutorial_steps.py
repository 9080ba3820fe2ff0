"""Custom steps in the style of keras.io: autoencoders, GANs, distillation, diffusion, masked language models.

Random numbers are made of the data, so that all ranks together draw what one device does.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops
from training import vectors

from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import assert_as_on_one_device

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(240), pytest.mark.usefixtures("float64")]

BATCH, WIDTH = 16, 15
EACH = pytest.mark.parametrize(("devices", "zero_stage"), [(2, 3), exhaustive(4, 0), exhaustive(2, 0), exhaustive(4, 2)])


def noise_of(x, width, seed):
    """Numbers like random ones, a row of them for each row of `x`."""
    kernel = np.random.default_rng(seed).normal(size=(x.shape[-1], width))
    return ops.sin(37.0 * ops.matmul(x, ops.convert_to_tensor(kernel)))


def train(strategy, build, data=None, size=37, epochs=2, callbacks=(), optimizers=None, validates=False, **compile_arguments):
    """Fits a model that `build` makes, and returns what it leaves."""
    data = vectors(size)[0].astype("float64") if data is None else data
    with strategy.scope():
        model = build()
        model.compile(**{"optimizer": keras.optimizers.Adam(0.01)} | (optimizers() if optimizers else {}) | compile_arguments)
    logs = BatchLogs()
    arguments = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0, "callbacks": [logs, *callbacks]}
    x, y = data if isinstance(data, tuple) else (data, None)
    validation = {"validation_data": data if y is not None else (x,), "validation_batch_size": BATCH} if validates else {}
    history = model.fit(x, y, **arguments, **validation).history
    return {"history": history, "batches": logs.train, "tests": logs.test, **state(model)}


def mlp(inputs, *units, name=None):
    hidden = [layers.Dense(unit, activation="tanh") for unit in units[:-1]]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(units[-1])], name=name)


class Autoencoder(keras.Model):
    """Keras's variational autoencoder: reconstruction, a sum over a row's elements, and KL, both means over rows."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(WIDTH, 9, 6), mlp(3, 9, WIDTH)
        self.total = keras.metrics.Mean(name="loss")
        self.reconstruction = keras.metrics.Mean(name="reconstruction_loss")
        self.kl = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total, self.reconstruction, self.kl]

    def losses_of(self, data):
        mean, log_var = ops.split(self.encoder(data), 2, axis=-1)
        z = mean + ops.exp(0.5 * log_var) * noise_of(data, 3, 1)
        logits = self.decoder(z)
        rows = ops.sum(keras.losses.binary_crossentropy(ops.sigmoid(data)[..., None], logits[..., None], True), axis=1)
        kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
        return ops.mean(rows), ops.mean(ops.sum(kl, axis=1))

    def logs(self, reconstruction, kl):
        self.total.update_state(reconstruction + kl)
        self.reconstruction.update_state(reconstruction)
        self.kl.update_state(kl)
        return {metric.name: metric.result() for metric in self.metrics}

    def train_step(self, data):
        with tf.GradientTape() as tape:
            reconstruction, kl = self.losses_of(data)
            total = reconstruction + kl
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return self.logs(reconstruction, kl)

    def test_step(self, data):
        return self.logs(*self.losses_of(data[0] if isinstance(data, tuple) else data))


@pytest.mark.exhaustive  # in the next test it trains by default
@EACH
def test_autoencoder(devices, zero_stage):
    def program(strategy):
        return train(strategy, Autoencoder, validates=True)

    assert_as_on_one_device(program, zero_stage, devices)


@pytest.mark.parametrize("zero_stage", [exhaustive(0), exhaustive(3)])
def test_a_callback_that_stops_on_a_log(zero_stage):
    """At a threshold that 1/N of the loss would pass in the first epoch."""

    def program(strategy):
        class StopBelow(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.stop_training = logs["loss"] < 10.5

        stopping = keras.callbacks.EarlyStopping(monitor="val_kl_loss", mode="min", patience=2, baseline=0.05)
        left = train(strategy, Autoencoder, epochs=12, callbacks=[StopBelow(), stopping], validates=True)
        assert 2 < len(left["history"]["loss"]) < 12
        return left

    assert_as_on_one_device(program, zero_stage)


class GAN(keras.Model):
    """Two optimizers, a tape each."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = mlp(4, 9, WIDTH), mlp(WIDTH, 9, 1)
        self.d_loss_tracker, self.g_loss_tracker = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]

    def compile(self, d_optimizer, g_optimizer, loss_fn=None):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def d_loss(self, real, latent):
        fake = self.generator(latent)
        images = ops.concatenate([fake, real], axis=0)
        labels = ops.concatenate([ops.ones((ops.shape(fake)[0], 1)), ops.zeros((ops.shape(real)[0], 1))], axis=0)
        return self.loss_fn(labels, self.critic(images))

    def g_loss(self, latent):
        predictions = self.critic(self.generator(latent))
        return self.loss_fn(ops.zeros_like(predictions), predictions)

    def train_step(self, real):
        with tf.GradientTape() as tape:
            d_loss = self.d_loss(real, noise_of(real, 4, 1))
        weights = self.critic.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.g_loss(noise_of(real, 4, 2))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}


class WassersteinGAN(GAN):
    """A gradient penalty, several steps of the critic, plain means, numbers for logs."""

    def d_loss(self, real, latent):
        fake = self.generator(latent)
        mixed = 0.3 * real + 0.7 * fake
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            predictions = self.critic(mixed)
        norms = ops.sqrt(ops.sum(ops.square(tape.gradient(predictions, [mixed])[0]), axis=1) + 1e-9)
        return ops.mean(self.critic(fake)) - ops.mean(self.critic(real)) + 10.0 * ops.mean((norms - 1.0) ** 2)

    def g_loss(self, latent):
        return -ops.mean(self.critic(self.generator(latent)))

    def train_step(self, real):
        for seed in range(2):
            with tf.GradientTape() as tape:
                d_loss = self.d_loss(real, noise_of(real, 4, seed))
            weights = self.critic.trainable_variables
            self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.g_loss(noise_of(real, 4, 5))
        weights = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


class OneTapeGAN(GAN):
    """TensorFlow's DCGAN: both losses under two tapes, of the same forward pass."""

    def train_step(self, real):
        with tf.GradientTape() as g_tape, tf.GradientTape() as d_tape:
            fake = self.generator(noise_of(real, 4, 1))
            real_output, fake_output = self.critic(real), self.critic(fake)
            g_loss = self.loss_fn(tf.ones_like(fake_output), fake_output)
            d_loss = self.loss_fn(tf.ones_like(real_output), real_output) + self.loss_fn(tf.zeros_like(fake_output), fake_output)
        g_weights, d_weights = self.generator.trainable_variables, self.critic.trainable_variables
        g_gradients, d_gradients = g_tape.gradient(g_loss, g_weights), d_tape.gradient(d_loss, d_weights)
        self.g_optimizer.apply_gradients(zip(g_gradients, g_weights, strict=True))
        self.d_optimizer.apply_gradients(zip(d_gradients, d_weights, strict=True))
        return {"g": g_loss, "d": d_loss}


def adversaries():
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return {"d_optimizer": keras.optimizers.Adam(0.01), "g_optimizer": keras.optimizers.RMSprop(0.003), "loss_fn": loss}


@pytest.mark.exhaustive  # a GAN: test_models_without_call.py; a penalty of gradients: test_batches_of_parts.py
@EACH
@pytest.mark.parametrize("build", [GAN, WassersteinGAN, OneTapeGAN])
def test_adversaries(devices, zero_stage, build):
    def program(strategy):
        data = vectors(37)[0].astype("float64")
        with strategy.scope():
            model = build()
            model.compile(**adversaries())
        logs = BatchLogs()
        history = model.fit(data, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[logs]).history
        slots = [v.numpy() for optimizer in (model.d_optimizer, model.g_optimizer) for v in optimizer.variables]
        return {"history": history, "batches": logs.train, "weights": model.get_weights(), "slots": slots}

    assert_as_on_one_device(program, zero_stage, devices)


class Distiller(keras.Model):
    """Keras's knowledge distillation: `compute_loss` of a student's loss and a divergence from its teacher."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = mlp(WIDTH, 9, 7), mlp(WIDTH, 7)
        self.teacher.trainable = False

    def compile(self, optimizer, student_loss_fn, distillation_loss_fn, **arguments):
        super().compile(optimizer, **arguments)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        teacher = self.teacher(x, training=False)
        student = self.student_loss_fn(y, y_pred)
        softened = [ops.softmax(each / 3.0, axis=1) for each in (teacher, y_pred)]
        return 0.2 * student + 0.8 * self.distillation_loss_fn(*softened) * 9.0

    def call(self, x):
        return self.student(x)


@pytest.mark.exhaustive  # losses of several kinds in one sum: test_custom_steps.py
@EACH
def test_distillation(devices, zero_stage):
    def program(strategy):
        x, y = vectors(37)
        losses = {
            "student_loss_fn": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "distillation_loss_fn": keras.losses.KLDivergence(),
            "metrics": ["sparse_categorical_accuracy"],
        }
        return train(strategy, Distiller, (x.astype("float64"), y), validates=True, **losses)

    assert_as_on_one_device(program, zero_stage, devices)


class Diffusion(keras.Model):
    """Noise is predicted; a moving average of the network is kept by hand."""

    def __init__(self):
        super().__init__()
        self.network, self.average = mlp(WIDTH + 1, 9, WIDTH), mlp(WIDTH + 1, 9, WIDTH)
        self.average.set_weights(self.network.get_weights())
        self.average.trainable = False
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker]

    def train_step(self, images):
        noises, times = noise_of(images, WIDTH, 1), 0.5 + 0.5 * noise_of(images, 1, 2)
        noisy = ops.sqrt(times) * images + ops.sqrt(1 - times) * noises
        with tf.GradientTape() as tape:
            predicted = self.network(ops.concatenate([noisy, times], axis=1), training=True)
            loss = self.loss(noises, predicted)
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.noise_loss_tracker.update_state(loss)
        for weight, average in zip(self.network.weights, self.average.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {metric.name: metric.result() for metric in self.metrics}


@pytest.mark.exhaustive
@EACH
def test_diffusion(devices, zero_stage):
    def program(strategy):
        return train(strategy, Diffusion, loss=keras.losses.MeanAbsoluteError())

    assert_as_on_one_device(program, zero_stage, devices)


class MaskedLanguageModel(keras.Model):
    """Keras's BERT: losses of words with `sample_weight` for those that were masked."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mixing, self.head = layers.Embedding(11, 8), layers.Dense(8, "tanh"), layers.Dense(11)
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, words):
        x = self.embedding(words)
        return self.head(self.mixing(x + ops.mean(x, axis=1, keepdims=True)))

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, inputs):
        features, labels, sample_weight = keras.utils.unpack_x_y_sample_weight(inputs)
        with tf.GradientTape() as tape:
            predictions = self(features, training=True)
            loss = self.loss_fn(labels, predictions, sample_weight=sample_weight)  # one for each word
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss, sample_weight=sample_weight)
        return {"loss": self.loss_tracker.result()}


class AverageOfMasked(MaskedLanguageModel):
    """The mean over the words that were masked, by Keras's reduction."""

    def train_step(self, inputs):
        features, labels, sample_weight = keras.utils.unpack_x_y_sample_weight(inputs)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
        with tf.GradientTape() as tape:
            loss = loss_fn(labels, self(features, training=True), sample_weight)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"mean": loss}


@EACH
@pytest.mark.parametrize("build", [MaskedLanguageModel, exhaustive(AverageOfMasked)])
def test_masked_language_models(devices, zero_stage, build):
    def program(strategy):
        rng = np.random.default_rng(4)
        words, masked = rng.integers(1, 11, size=(37, 6)), rng.uniform(size=(37, 6)) < 0.2
        with strategy.scope():
            model = build()
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9))  # Adam squares the rows of repeated words one by one
        logs, features = BatchLogs(), np.where(masked, 0, words)
        fitting = {"sample_weight": masked.astype("float64"), "batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(features, words, callbacks=[logs], **fitting).history
        return {"history": history, "batches": logs.train, **state(model)}

    assert_as_on_one_device(program, zero_stage, devices)


class Siamese(keras.Model):
    """SimSiam: two views of a row, a stopped gradient, and weight decay added to gradients by hand (stages 0 to 2)."""

    def __init__(self):
        super().__init__()
        self.encoder, self.predictor = mlp(WIDTH, 9, 6), mlp(6, 4, 6)

    def train_step(self, data):
        one, other = data[0]["one"], data[0]["other"]
        with tf.GradientTape() as tape:
            z1, z2 = self.encoder(one), self.encoder(other)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            loss = self.distance(p1, z2) / 2 + self.distance(p2, z1) / 2
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss, "std": ops.mean(z1)}

    def distance(self, p, z):
        return -tf.reduce_mean(tf.reduce_sum(tf.math.l2_normalize(p, 1) * tf.math.l2_normalize(tf.stop_gradient(z), 1), axis=1))


@pytest.mark.exhaustive
@EACH
def test_two_views(devices, zero_stage):
    def program(strategy):
        x = vectors(37)[0].astype("float64")
        return train(strategy, Siamese, ({"one": x * 1.1, "other": x + 0.1}, vectors(37)[1]))

    assert_as_on_one_device(program, zero_stage, devices)
