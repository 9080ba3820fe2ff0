"""Programs in the style of keras.io's examples of vision, beside one device."""

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


class MaskedAutoencoder(keras.Model):
    """Of nine patches five are hidden, those of a row by its number; the loss is of the hidden ones."""

    def __init__(self):
        super().__init__()
        self.embed, self.encode, self.decode = layers.Dense(8), layers.MultiHeadAttention(2, 4), layers.Dense(16)
        self.norm = layers.LayerNormalization()
        self.mask_token = self.add_weight(shape=(1, 1, 8), initializer="zeros", name="mask_token")
        self.place = self.add_weight(shape=(9, 8), initializer="glorot_uniform", name="place")
        self.loss_tracker = keras.metrics.Mean("loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def loss_of(self, data):
        images, order = data
        patches = tf.reshape(tf.image.extract_patches(images, [1, 4, 4, 1], [1, 4, 4, 1], [1] * 4, "VALID"), [-1, 9, 16])
        tokens = self.embed(patches) + self.place
        seen, hidden = order[:, :4], order[:, 4:]
        seen_tokens = tf.gather(tokens, seen, batch_dims=1)
        encoded = self.norm(seen_tokens + self.encode(seen_tokens, seen_tokens))
        masked = tf.gather(tf.broadcast_to(self.mask_token + self.place, tf.shape(tokens)), hidden, batch_dims=1)
        found = self.decode(masked + tf.reduce_mean(encoded, 1, keepdims=True))
        return tf.reduce_mean((found - tf.gather(patches, hidden, batch_dims=1)) ** 2)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self.loss_of(data))
        return {"loss": self.loss_tracker.result()}


def masked_autoencoder(strategy):
    order = np.argsort(np.random.default_rng(3).random((ROWS, 9)), 1).astype("int32")
    with strategy.scope():
        model = MaskedAutoencoder()
        model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.02, epsilon=1e-3))
    found = fitted(model, normal(12, 12, 1), order)
    return found, model.evaluate(normal(12, 12, 1), order, batch_size=BATCH, verbose=0)


class ArcFace(layers.Layer):
    """Angles to each class's direction, that of a row's own made larger by a margin."""

    def build(self, shapes):
        self.directions = self.add_weight(
            shape=(shapes[0][-1], 4), initializer="glorot_uniform", regularizer="l2", name="directions"
        )

    def call(self, inputs):
        features, labels = inputs
        cosine = ops.normalize(features, axis=1) @ ops.normalize(self.directions, axis=0)
        angle = ops.arccos(ops.clip(cosine, -1 + 1e-4, 1 - 1e-4))
        own = ops.one_hot(ops.reshape(labels, (-1,)), 4)
        return 8.0 * (own * ops.cos(angle + 0.3) + (1 - own) * cosine)


def margins(strategy):
    with strategy.scope():
        image, label = keras.Input((8, 8, 1)), keras.Input((1,), dtype="int32")
        hidden = layers.Dense(6)(layers.GlobalAveragePooling2D()(layers.Conv2D(5, 3, activation="relu")(image)))
        model = keras.Model([image, label], ArcFace()([hidden, label]))
        model.compile(sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        embedding = keras.Model(image, hidden)
    x, y = normal(8, 8, 1), integers(4)
    found = fitted(model, (x, y[:, None]), y, validation_split=0.3)
    return found, embedding.predict(x, batch_size=BATCH, verbose=0)


def super_resolution(strategy):
    """Efficient sub-pixel convolution, with a ratio of signal to noise for each image as a metric."""
    with strategy.scope():
        image = keras.Input((None, None, 1))
        hidden = layers.Conv2D(5, 5, padding="same", activation="tanh", kernel_initializer="orthogonal")(image)
        hidden = layers.Conv2D(4, 3, padding="same")(hidden)
        model = keras.Model(image, layers.Lambda(lambda x: tf.nn.depth_to_space(x, 2), output_shape=(None, None, 1))(hidden))

        def psnr(y, found):
            return tf.image.psnr(y, found, max_val=4.0)

        model.compile(adam(), "mse", metrics=[psnr])
    return fitted(model, normal(5, 7, 1), normal(10, 14, 1, seed=2), validation_split=0.25)


class Radiance(keras.Model):
    """NeRF: colours and densities along each ray, whose transmittances multiply."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((6, 9)), layers.Dense(8, "relu"), layers.Dense(4)])
        self.loss_tracker, self.psnr = keras.metrics.Mean("loss"), keras.metrics.Mean("psnr")

    @property
    def metrics(self):
        return [self.loss_tracker, self.psnr]

    def render(self, points):
        waves = [fn(2.0**power * points) for power in (0,) for fn in (tf.sin, tf.cos)]
        found = self.net(tf.concat([points, *waves], -1))
        colour, density = tf.sigmoid(found[..., :3]), tf.nn.relu(found[..., 3])
        opaque = 1 - tf.exp(-density * 0.3)
        weights = opaque * tf.math.cumprod(1 - opaque + 1e-10, axis=-1, exclusive=True)
        return tf.reduce_sum(weights[..., None] * colour, -2)

    def step(self, points, colours):
        with tf.GradientTape() as tape:
            found = self.render(points)
            loss = self.compute_loss(y=colours, y_pred=found)
        self.psnr.update_state(tf.image.psnr(colours[:, None, None], found[:, None, None], 1.0))
        self.loss_tracker.update_state(loss)
        return tape, loss

    def train_step(self, data):
        tape, loss = self.step(*data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        self.step(*data)
        return {m.name: m.result() for m in self.metrics}


def radiance_field(strategy):
    with strategy.scope():
        model = Radiance()
        model.compile(adam(), keras.losses.MeanSquaredError())
    colours = np.random.default_rng(2).random((ROWS, 3)).astype("float32")
    return fitted(model, normal(6, 3), colours, validation_data=(normal(6, 3, seed=3), colours))


@keras.saving.register_keras_serializable("examples_of_vision")
class Orthogonal(keras.regularizers.Regularizer):
    """PointNet's: of what a layer returns, which is to be a rotation for each row."""

    def __call__(self, x):
        x = ops.reshape(x, (-1, 3, 3))
        return ops.sum(0.01 * ops.square(x @ ops.transpose(x, (0, 2, 1)) - ops.eye(3)))


def point_cloud(strategy):
    with strategy.scope():
        points = keras.Input((10, 3))
        hidden = layers.BatchNormalization(momentum=0.0, synchronized=True)(layers.Conv1D(5, 1)(points))
        hidden = layers.GlobalMaxPooling1D()(layers.ReLU()(hidden))
        turn = layers.Dense(
            9, bias_initializer=keras.initializers.Constant(np.eye(3).flatten()), activity_regularizer=Orthogonal()
        )
        turned = layers.Dot((2, 1))([points, layers.Reshape((3, 3))(turn(hidden))])
        hidden = layers.GlobalMaxPooling1D()(layers.Conv1D(6, 1, activation="relu")(turned))
        model = keras.Model(points, layers.Dense(4, "softmax")(hidden))
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["sparse_categorical_accuracy"])
    return fitted(model, normal(10, 3), integers(4))


def next_frames(strategy):
    """Convolutional LSTMs, of which one returns all its states."""
    with strategy.scope():
        frames = [layers.ConvLSTM2D(3, 3, padding="same", return_sequences=True, activation="relu"), layers.LayerNormalization()]
        last = [layers.ConvLSTM2D(2, 1, return_sequences=True), layers.Conv3D(1, 3, padding="same", activation="sigmoid")]
        model = keras.Sequential([keras.Input((None, 6, 6, 1)), *frames, *last])
        plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, min_delta=1.0)
        model.compile(adam(), "binary_crossentropy")
    y = np.random.default_rng(1).integers(0, 2, (ROWS, 4, 6, 6, 1)).astype("float32")
    return fitted(model, normal(4, 6, 6, 1), y, validation_split=0.2, callbacks=[plateau], epochs=3)


class Enhanced(keras.Model):
    """Zero-DCE: curves that brighten an image, trained without targets by losses of what comes out."""

    def __init__(self):
        super().__init__()
        self.curves = keras.Sequential(
            [keras.Input((8, 8, 3)), layers.Conv2D(4, 3, padding="same"), layers.Conv2D(6, 3, padding="same")]
        )

    def compile(self, **arguments):
        super().compile(**arguments)
        self.trackers = {name: keras.metrics.Mean(name) for name in ("total_loss", "smooth", "constancy", "exposure")}

    @property
    def metrics(self):
        return list(self.trackers.values())

    def losses_of(self, images):
        curves = tf.tanh(self.curves(images))
        x = images
        for curve in tf.split(curves, 2, axis=-1):
            x = x + curve * (tf.square(x) - x)
        means = tf.reduce_mean(x, axis=(1, 2))
        red, green, blue = tf.unstack(means, axis=-1)
        constancy = tf.sqrt((red - green) ** 4 + (red - blue) ** 4 + (green - blue) ** 4 + 1e-6)
        exposure = tf.reduce_mean((tf.nn.avg_pool2d(tf.reduce_mean(x, 3, keepdims=True), 4, 4, "VALID") - 0.6) ** 2)
        height = tf.reduce_sum((curves[:, 1:] - curves[:, :-1]) ** 2)
        smooth = height / tf.cast(tf.shape(images)[0], tf.float32)
        parts = {"smooth": 0.1 * smooth, "constancy": 5 * tf.reduce_mean(constancy), "exposure": 10 * exposure}
        return {"total_loss": sum(parts.values()), **parts}

    def noted(self, losses):
        for name, value in losses.items():
            self.trackers[name].update_state(value)
        return {metric.name: metric.result() for metric in self.metrics}

    def train_step(self, images):
        with tf.GradientTape() as tape:
            losses = self.losses_of(images)
        grads = tape.gradient(losses["total_loss"], self.curves.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.curves.trainable_weights, strict=True))
        return self.noted(losses)

    def test_step(self, images):
        return self.noted(self.losses_of(images))


def low_light(strategy):
    images = np.random.default_rng(3).random((ROWS, 8, 8, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices(images).batch(BATCH)
    with strategy.scope():
        model = Enhanced()
        model.compile(optimizer=adam())
    return {"history": model.fit(data, validation_data=data, epochs=2, verbose=0).history, **state(model)}


def mixed_images(strategy):
    """MixUp of two datasets in `tf.data`, with soft labels and a cosine schedule that warms up."""
    one, other = (
        tf.data.Dataset.from_tensor_slices((normal(6, 6, 1, seed=s), np.eye(3, dtype="float32")[integers(3, seed=s)]))
        for s in (1, 2)
    )

    def mixed(one, other):
        share = tf.reshape(tf.linspace(0.1, 0.9, tf.shape(one[0])[0]), [-1, 1, 1, 1])
        return one[0] * share + other[0] * (1 - share), one[1] * share[:, 0, 0] + other[1] * (1 - share[:, 0, 0])

    data = tf.data.Dataset.zip((one.batch(BATCH), other.batch(BATCH))).map(mixed).prefetch(2)
    with strategy.scope():
        hidden = [layers.DepthwiseConv2D(3, depth_multiplier=2, activation="gelu"), layers.Flatten()]
        model = keras.Sequential([keras.Input((6, 6, 1)), *hidden, layers.Dense(3, "softmax")])
        schedule = keras.optimizers.schedules.CosineDecay(0.0, 6, warmup_target=0.1, warmup_steps=2)
        loss = keras.losses.CategoricalCrossentropy(label_smoothing=0.1)
        model.compile(keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True), loss, metrics=["accuracy"])
    return {"history": model.fit(data, epochs=2, verbose=0).history, **state(model)}


class Perceiver(keras.Model):
    """Latents of the model attend to a row's patches, several times with the same layers."""

    def __init__(self):
        super().__init__()
        self.patches, self.cross, self.self_attention = (
            layers.Dense(6),
            layers.MultiHeadAttention(2, 3),
            layers.MultiHeadAttention(2, 3),
        )
        self.latents = self.add_weight(shape=(4, 6), initializer="random_normal", name="latents")
        self.norm, self.head = layers.LayerNormalization(), layers.Dense(3)

    def call(self, x):
        x = self.patches(x)
        latents = ops.broadcast_to(ops.expand_dims(self.latents, 0), (ops.shape(x)[0], 4, 6))
        for _ in range(2):
            latents = self.norm(latents + self.cross(latents, x))
            latents = self.norm(latents + self.self_attention(latents, latents))
        return self.head(ops.mean(latents, axis=1))


def perceiver(strategy):
    with strategy.scope():
        model = Perceiver()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Lamb(0.01, epsilon=1e-3), loss, metrics=[keras.metrics.SparseTopKCategoricalAccuracy(2)])
    return fitted(model, normal(9, 5), integers(3)), model.predict(normal(9, 5), batch_size=5, verbose=0)


PROGRAMS = (
    masked_autoencoder, margins, super_resolution, radiance_field, point_cloud, next_frames, low_light, mixed_images, perceiver,
)  # fmt: skip


@pytest.mark.parametrize(
    ("program", "zero_stage", "devices"),
    [exhaustive(program, stage, devices) for program in PROGRAMS for stage, devices in ((0, 2), (3, 4))],
)
def test_it_is_one_device(program, zero_stage, devices):
    assert_as_on_one_device(program, zero_stage, devices)
