"""Examples in the style of keras.io's, of unusual layers and steps: flows, energies, equations, masked kernels, 8 bits."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops

from tests.programs.comparing import assert_as_on_one_device
from tests.programs.small_training import BATCH, ROWS, adam, fitted, normal, sgd

pytestmark = pytest.mark.as_traced


class Flow(keras.Model):
    """RealNVP: two coupling layers, each of two networks with regularized weights."""

    def __init__(self):
        super().__init__()
        self.nets = [self.net("tanh", number) for number in range(2)] + [self.net(None, number) for number in range(2)]
        self.masks = tf.constant([[0, 1], [1, 0]], tf.float32)
        self.loss_tracker = keras.metrics.Mean("loss")

    @staticmethod
    def net(activation, number):
        decay = keras.regularizers.l2(0.01)
        hidden = layers.Dense(7, "relu", kernel_regularizer=decay)
        return keras.Sequential([keras.Input((2,)), hidden, layers.Dense(2, activation, kernel_regularizer=decay)])

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        log_determinant = 0
        for number in reversed(range(2)):
            kept = x * self.masks[number]
            moved = 1 - self.masks[number]
            s, t = (net(kept) * moved for net in (self.nets[number], self.nets[2 + number]))
            x = moved * (x * tf.exp(-s) - t * tf.exp(-s)) + kept
            log_determinant -= tf.reduce_sum(s, 1)
        return x, log_determinant

    def log_loss(self, x):
        y, log_determinant = self(x)
        return -tf.reduce_mean(-0.5 * tf.reduce_sum(y**2, 1) + log_determinant) + sum(self.losses)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = self.log_loss(x)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, x):
        self.loss_tracker.update_state(self.log_loss(x))
        return {"loss": self.loss_tracker.result()}


def normalizing_flow(strategy):
    with strategy.scope():
        model = Flow()
        model.compile(adam())
    found = fitted(model, normal(2), validation_data=(normal(2, seed=2),), validation_batch_size=5)
    return found, model.predict(normal(2), batch_size=BATCH, verbose=0)


class EnergyBased(keras.Model):
    """Rows go down the energy for a few steps of Langevin's dynamics before their energy is compared with that of the data."""

    def __init__(self):
        super().__init__()
        self.energy = keras.Sequential([keras.Input((4,)), layers.Dense(6, "swish"), layers.Dense(1)])
        self.trackers = [keras.metrics.Mean("divergence"), keras.metrics.Mean("regularization")]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        x, moved = data
        for _ in range(3):
            with tf.GradientTape() as tape:
                tape.watch(moved)
                energy = tf.reduce_sum(self.energy(moved))
            moved = tf.clip_by_value(moved - 0.2 * tf.clip_by_value(tape.gradient(energy, moved), -0.5, 0.5), -2.0, 2.0)
        moved = tf.stop_gradient(moved)
        with tf.GradientTape() as tape:
            real, fake = tf.split(self.energy(tf.concat([x, moved], 0)), 2)
            divergence, regularization = tf.reduce_mean(real) - tf.reduce_mean(fake), tf.reduce_mean(real**2 + fake**2)
            loss = divergence + 0.1 * regularization
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for tracker, value in zip(self.trackers, (divergence, regularization), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


def energy_based(strategy):
    with strategy.scope():
        model = EnergyBased()
        model.compile(keras.optimizers.Adam(0.01, beta_1=0.0, clipnorm=0.5, epsilon=1e-3))
    return fitted(model, normal(4), normal(4, seed=5))


class Dynamics(layers.Layer):
    """An ordinary differential equation's solution, by Euler's steps in a loop of the graph."""

    def __init__(self, steps):
        super().__init__()
        self.steps, self.velocity = steps, keras.Sequential([layers.Dense(7, "tanh"), layers.Dense(4)])

    def build(self, shape):
        self.velocity.build((None, 5))

    def call(self, x):
        def move(number, x):
            time = ops.full_like(x[:, :1], 1.0) * ops.cast(number, "float32") / self.steps
            return number + 1, x + self.velocity(ops.concatenate([x, time], 1)) / self.steps

        return ops.while_loop(lambda number, _: number < self.steps, move, (0, x), maximum_iterations=self.steps)[1]


def differential_equation(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Dynamics(5), layers.Dense(2)])
        model.compile(adam(), "huber")
    return fitted(model, normal(4), normal(2, seed=4))


class Causal(layers.Layer):
    """PixelCNN: a convolution whose kernel is masked when the layer is built."""

    def __init__(self, kind, **arguments):
        super().__init__()
        self.kind, self.convolution = kind, layers.Conv2D(**arguments)

    def build(self, shape):
        self.convolution.build(shape)
        mask = np.zeros(self.convolution.kernel.shape)
        mask[:1], mask[1, :1] = 1.0, 1.0
        mask[1, 1] = self.kind == "B"
        self.mask = ops.convert_to_tensor(mask, "float32")

    def call(self, x):
        return ops.nn.relu(ops.conv(x, self.convolution.kernel * self.mask, padding="same") + self.convolution.bias)


def causal_pixels(strategy):
    with strategy.scope():
        hidden = [
            Causal("A", filters=4, kernel_size=3),
            Causal("B", filters=4, kernel_size=3),
            layers.Conv2D(1, 1, activation="sigmoid"),
        ]
        model = keras.Sequential([keras.Input((6, 6, 1)), *hidden])
        model.compile(adam(), "binary_crossentropy")
    pixels = np.random.default_rng(2).integers(0, 2, (ROWS, 6, 6, 1)).astype("float32")
    found = fitted(model, pixels, pixels)
    drawn = np.zeros((2, 6, 6, 1), "float32")
    for row in range(2):
        drawn[:, row, 0] = model(drawn)[:, row, 0].numpy()
    return found, drawn


class Forward(keras.Model):
    """The forward-forward algorithm: each layer has an optimizer of its own, and learns from what comes in, real or false."""

    def __init__(self):
        super().__init__()
        self.dense = [layers.Dense(6, "relu"), layers.Dense(5, "relu")]
        self.optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01, epsilon=1e-3)]
        self.trackers = [keras.metrics.Mean("first"), keras.metrics.Mean("second")]
        self.dense[0].build((None, 4))
        self.dense[1].build((None, 6))
        self.built = True

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        real, false = data
        for dense, optimizer, tracker in zip(self.dense, self.optimizers, self.trackers, strict=True):
            for _ in range(2):
                with tf.GradientTape() as tape:
                    good, bad = (
                        tf.reduce_mean(dense(x / (tf.norm(x, axis=1, keepdims=True) + 1e-4)) ** 2, 1) for x in (real, false)
                    )
                    loss = tf.reduce_mean(tf.math.softplus(tf.concat([0.5 - good, bad - 0.5], 0)))
                optimizer.apply(tape.gradient(loss, dense.trainable_weights), dense.trainable_weights)
                tracker.update_state(loss)
            real, false = (tf.stop_gradient(dense(x / (tf.norm(x, axis=1, keepdims=True) + 1e-4))) for x in (real, false))
        return {tracker.name: tracker.result() for tracker in self.trackers}


def forward_forward(strategy):
    with strategy.scope():
        model = Forward()
        model.compile()
    found = model.fit(normal(4), normal(4, seed=9), batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return found, model.get_weights(), [v.numpy() for optimizer in model.optimizers for v in optimizer.variables]


class Quantized(layers.Layer):
    """Quantization-aware training: weights and activations are rounded to 8 bits, the latter in a range that is averaged."""

    def __init__(self, units):
        super().__init__()
        self.dense = layers.Dense(units)

    def build(self, shape):
        self.dense.build(shape)
        self.low = self.add_weight(shape=(), initializer=keras.initializers.Constant(-2.0), trainable=False, name="low")
        self.high = self.add_weight(shape=(), initializer=keras.initializers.Constant(2.0), trainable=False, name="high")

    def call(self, x, training=False):
        if training:
            self.low.assign(0.9 * self.low + 0.1 * tf.minimum(tf.reduce_min(x), 0.0))
            self.high.assign(0.9 * self.high + 0.1 * tf.maximum(tf.reduce_max(x), 0.0))
        x = tf.quantization.fake_quant_with_min_max_vars(x, tf.convert_to_tensor(self.low), tf.convert_to_tensor(self.high))
        kernel = tf.convert_to_tensor(self.dense.kernel)
        largest = tf.stop_gradient(tf.reduce_max(tf.abs(kernel)))
        kernel = tf.quantization.fake_quant_with_min_max_vars(kernel, -largest, largest, narrow_range=True)
        return x @ kernel + self.dense.bias

    def compute_output_shape(self, shape):
        return (*shape[:-1], self.dense.units)


def quantization_aware(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Quantized(6), layers.ReLU(), Quantized(2)])
        model.compile(sgd(), "mse")
    return fitted(model, normal(4), normal(2, seed=3)), model.evaluate(normal(4), normal(2), batch_size=BATCH, verbose=0)


PROGRAMS = (
    normalizing_flow, energy_based, differential_equation, causal_pixels, forward_forward, quantization_aware,
)  # fmt: skip


@pytest.mark.parametrize(
    ("program", "zero_stage", "devices"),
    [exhaustive(program, stage, devices) for program in PROGRAMS for stage, devices in ((0, 2), (3, 4))],
)
def test_it_is_one_device(program, zero_stage, devices):
    assert_as_on_one_device(program, zero_stage, devices)
