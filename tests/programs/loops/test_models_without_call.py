"""Models as keras.io writes them: a `train_step` and no `call`, data that are not (x, y), layers built in the first step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers
from ranks import rank_id
from training import strategy_for

from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import assert_as_on_one_device

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(200)]

RNG = np.random.default_rng(11)
REAL = RNG.normal(size=(20, 6)).astype("float32")
NOISE = RNG.normal(size=(20, 3)).astype("float32")
TARGET = RNG.integers(0, 4, size=20)
UNEVEN = {"batch_size": 8, "verbose": 0, "shuffle": False}  # 8, 8 and 4 rows


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


class GAN(keras.Model):
    """The DCGAN of keras.io, with the noise among the data: two models, two optimizers, metrics of its own, and no `call`."""

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential([layers.Dense(5), layers.LeakyReLU(0.2), layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(6, activation="tanh")])

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data):
        real, noise = data
        rows = tf.shape(real)[0]
        together = tf.concat([self.generator(noise), real], axis=0)
        labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(together))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros((rows, 1)), self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss_metric.update_state(tf.reduce_mean(self.discriminator(real)), sample_weight=rows)
        self.g_loss_metric.update_state(tf.reduce_mean(self.generator(noise)), sample_weight=rows)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def gan(strategy):
    with strategy.scope():
        model = GAN()
        model.compile(sgd(), keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
    logs = BatchLogs()
    history = model.fit(REAL, NOISE, epochs=2, callbacks=[logs], **UNEVEN).history
    made = model.generator.predict(NOISE, batch_size=8, verbose=0)
    optimizers = model.d_optimizer, model.g_optimizer
    slots = [[variable.numpy() for variable in optimizer.variables] for optimizer in optimizers]
    return {"history": history, "logs": logs.train, "made": made, "weights": model.get_weights(), "slots": slots}


def gan_of_a_dataset(strategy):
    """From (x, y), of which it takes x for both; compiled outside the scope, with optimizers that were made there."""
    with strategy.scope():
        model = GAN()
    model.compile(keras.optimizers.Adam(0.01), sgd(), keras.losses.BinaryCrossentropy(from_logits=True))
    dataset = tf.data.Dataset.from_tensor_slices((REAL, NOISE)).batch(8)
    return {"history": model.fit(dataset, epochs=2, verbose=0).history, "weights": model.get_weights()}


class Siamese(keras.Model):
    """Triplets: three inputs of one example, and no label. Keras takes them for x, y and sample_weight."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.Sequential([layers.Dense(7, activation="relu"), layers.Dense(3)])
        self.distance = keras.metrics.Mean(name="distance")
        self.loss_of = keras.losses.MeanSquaredError()

    def call(self, anchor, positive, negative):
        a, p, n = self.embedding(anchor), self.embedding(positive), self.embedding(negative)
        return keras.ops.stack([keras.ops.sum((a - p) ** 2, -1), keras.ops.sum((a - n) ** 2, -1)], axis=-1)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            distances = self(*data)
            loss = self.loss_of(tf.zeros_like(distances[:, :1]), tf.nn.relu(distances[:, :1] - distances[:, 1:] + 0.5))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.distance.update_state(distances)
        return {"distance": self.distance.result()}

    def test_step(self, data):
        self.distance.update_state(self(*data))
        return {"distance": self.distance.result()}

    @property
    def metrics(self):
        return [self.distance]


def triplets(strategy):
    with strategy.scope():
        model = Siamese()
        model.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.9))
    dataset = tf.data.Dataset.from_tensor_slices((REAL, REAL[::-1].copy(), REAL * 0.5)).batch(8)
    history = model.fit(dataset, epochs=2, validation_data=dataset, verbose=0).history
    return {"history": history, "evaluated": model.evaluate(dataset, verbose=0, return_dict=True), **state(model)}


class FromDictionaries(keras.Model):
    """A dictionary as the only thing that the dataset yields, nested; a `predict_step` that uses it, too."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = layers.Dense(5, activation="tanh"), layers.Dense(4)

    def logits(self, batch):
        return self.head(self.hidden(keras.ops.concatenate([batch["features"]["a"], batch["features"]["b"]], axis=-1)))

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            logits = self.logits(batch)
            loss = self.compute_loss(y=batch["target"], y_pred=logits)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.compute_metrics(None, batch["target"], logits)

    def test_step(self, batch):
        return self.compute_metrics(None, batch["target"], self.logits(batch))

    def predict_step(self, batch):
        return {"class": tf.argmax(self.logits(batch), -1), "target": batch["target"]}


def dictionaries(strategy):
    with strategy.scope():
        model = FromDictionaries()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=sgd(), loss=loss, metrics=["accuracy"])
    batch = {"features": {"a": REAL, "b": NOISE}, "target": TARGET}
    dataset = tf.data.Dataset.from_tensor_slices(batch).batch(8)
    history = model.fit(dataset, epochs=2, verbose=0).history["accuracy"]
    evaluated = model.evaluate(dataset, verbose=0, return_dict=True)["accuracy"]
    return {"history": history, "evaluated": evaluated, "predicted": model.predict(dataset, verbose=0), **state(model)}


class PythonNumbers(keras.Model):
    """`call` looks at numbers, as one does when something is wrong: only an eager run bears it."""

    def __init__(self):
        super().__init__()
        self.hidden, self.heads = layers.Dense(5, activation="tanh"), [layers.Dense(4), layers.Dense(4)]

    def call(self, x):
        hidden = self.hidden(x)
        if float(keras.ops.max(keras.ops.abs(hidden))) > 1.5 or not np.isfinite(hidden.numpy()).all():
            raise FloatingPointError
        return self.heads[0](hidden) + self.heads[1](x)


def eagerly(strategy):
    with strategy.scope():
        model = PythonNumbers()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = ["accuracy", keras.metrics.MeanIoU(4, sparse_y_pred=False, name="iou")]
        model.compile(optimizer=sgd(), loss=loss, metrics=metrics, run_eagerly=True)
    history = model.fit(REAL, TARGET, epochs=2, validation_data=(REAL, TARGET), **UNEVEN).history
    predicted = model.predict(REAL, batch_size=8, verbose=0)
    return {"history": history, "predicted": predicted, **state(model)}


class OnlyCall(keras.Model):
    """Keras's own steps, layers without `build`, and a `call` that symbols do not pass."""

    def __init__(self):
        super().__init__()
        self.blocks = [layers.Dense(5, activation="tanh"), layers.Dense(4)]

    def call(self, inputs):
        if isinstance(inputs, keras.KerasTensor) or tf.executing_eagerly():
            raise NotImplementedError("in a step only")
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def built_in_the_first_step(strategy):
    with strategy.scope():
        model = OnlyCall()
        model.call = tf.autograph.experimental.do_not_convert(model.call)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"])
    history = model.fit(REAL, TARGET, epochs=2, validation_data=(REAL, TARGET), **UNEVEN).history
    return {"history": history, "predicted": model.predict(REAL, batch_size=8, verbose=0), **state(model)}


class WithMetrics(keras.Model):
    """The loop over `metrics` of Keras's guide; all that it needs is built within the loop of `steps_per_execution`."""

    def __init__(self):
        super().__init__()
        self.hidden, self.normalized, self.head = layers.Dense(5), layers.LayerNormalization(), layers.Dense(4)

    def call(self, x):
        return self.head(keras.ops.tanh(self.normalized(self.hidden(x))))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def several_steps_at_once(strategy):
    with strategy.scope():
        model = WithMetrics()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(sgd(), loss, metrics=["accuracy"], steps_per_execution=2)
    return {"history": model.fit(REAL, TARGET, epochs=2, **UNEVEN).history, **state(model)}


class Normalized(keras.Model):
    """Keras builds it by a symbolic call, in which synchronized statistics are a message between ranks."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = layers.Dense(5, activation="tanh"), layers.Dense(4)
        self.normalized = layers.BatchNormalization(synchronized=True)

    def call(self, x, training=False):
        return self.head(self.normalized(self.hidden(x), training=training))


def built_in_a_loop_of_ones_own(strategy):
    with strategy.scope():
        model, optimizer = Normalized(), keras.optimizers.SGD(0.1)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step_on_rank(x, y):
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            loss = loss_of(y, y_pred)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        accuracy.update_state(y, y_pred)
        return loss

    @tf.function
    def step(x, y):
        return strategy.reduce("SUM", strategy.run(step_on_rank, args=(x, y)), axis=None)

    dataset = tf.data.Dataset.from_tensor_slices((REAL, TARGET)).batch(8)
    losses = [float(step(*batch)) for batch in strategy.experimental_distribute_dataset(dataset)]
    return {"losses": losses, "weights": model.get_weights(), "accuracy": float(accuracy.result())}


PROGRAMS = [gan, dictionaries, triplets, built_in_the_first_step, eagerly, built_in_a_loop_of_ones_own, several_steps_at_once]
PROGRAMS += [gan_of_a_dataset]


ELSEWHERE = (gan_of_a_dataset, triplets, built_in_a_loop_of_ones_own)


def cases():
    """The programs at stages 0 and 3 in turns; the rest is exhaustive, and what other programs have, too."""
    for place, program in enumerate(PROGRAMS):
        for stage in range(4):
            yield ((program, stage) if stage == (3, 0)[place % 2] and program not in ELSEWHERE else exhaustive(program, stage))


@pytest.mark.parametrize(("program", "zero_stage"), list(cases()))
def test_as_on_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)


@pytest.mark.parametrize("program", [exhaustive(program) for program in PROGRAMS])
def test_three_devices(program):
    assert_as_on_one_device(program, 3, devices=3)


def test_what_a_step_makes_does_not_trace_it_twice():
    """TensorFlow traces a function again that has made variables; here they are made apart from it."""
    traced = []

    class Counted(FromDictionaries):
        def train_step(self, batch):
            traced.append(rank_id())
            return super().train_step(batch)

    with strategy_for(2, 3).scope():
        model = Counted()
        model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batch = {"features": {"a": REAL, "b": NOISE}, "target": TARGET}
    model.fit(tf.data.Dataset.from_tensor_slices(batch).batch(10, drop_remainder=True), verbose=0)
    assert traced == [0, 1]
    assert len(model.optimizer.variables) == 2 + 2 * len(model.trainable_variables)
