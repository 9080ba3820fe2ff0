"""Models that share layers, or train each other: towers, heads, old GANs, actors and critics, models that grow."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops

from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device
from tests.programs.small_training import BATCH, adam, fitted, integers, mlp, normal, sgd

pytestmark = pytest.mark.as_traced


class SharedTowers(keras.Model):
    """A model of models, some of which share layers, and one of which is another's part."""

    def __init__(self):
        super().__init__()
        shared = layers.Dense(5, "tanh", name="shared")
        one, other = keras.Input((4,)), keras.Input((4,))
        self.left = keras.Model(one, layers.Dense(5)(shared(one)), name="left")
        self.right = keras.Model(other, shared(self.left(other)[:, :4]), name="right")
        self.head = layers.Dense(2)

    def call(self, inputs, training=None):
        return self.head(self.left(inputs["one"], training=training) * self.right(inputs["other"], training=training))


def shared_layers(strategy):
    with strategy.scope():
        model = SharedTowers()
        model.compile(adam(), "mse")
        part = keras.Model(model.left.inputs, layers.Dense(3, "softmax")(model.left.outputs[0]))
        part.compile(sgd(), "sparse_categorical_crossentropy")
    x = {"one": normal(4), "other": normal(4, seed=3)}
    found = [fitted(model, x, normal(2, seed=2)), fitted(part, x["one"], integers(3)), fitted(model, x, normal(2, seed=2))]
    return found, model.predict(x, batch_size=5, verbose=0)


def autoencoder_then_classifier(strategy):
    """Alternating fits of two models that share an encoder, which is frozen for some of them."""
    with strategy.scope():
        encoder, decoder = mlp(6, 3, name="encoder"), mlp(6, 4, inputs=3, name="decoder")
        rows = keras.Input((4,))
        autoencoder, classifier = keras.Model(rows, decoder(encoder(rows))), keras.Model(rows, layers.Dense(3)(encoder(rows)))
        autoencoder.compile(sgd(), "mse")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        classifier.compile(adam(), loss)
    x, y = normal(4), integers(3)
    found = [fitted(autoencoder, x, x), fitted(classifier, x, y), fitted(autoencoder, x, x)]
    encoder.trainable = False
    with strategy.scope():
        classifier.compile(adam(), loss)
    return found, fitted(classifier, x, y), encoder.predict(x, verbose=0)


def adversaries_batch_by_batch(strategy):
    """The GAN of Keras's early days: a model of both, in which the discriminator is frozen, and `train_on_batch` in turns."""
    with strategy.scope():
        generator, discriminator = mlp(6, 4, inputs=3), mlp(5, 1)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        discriminator.compile(adam(), loss, metrics=["accuracy"])
        discriminator.trainable = False
        noise = keras.Input((3,))
        both = keras.Model(noise, discriminator(generator(noise)))
        both.compile(adam(), loss)
    found = []
    for number in range(3):
        rows = slice(number * 7, number * 7 + 7)
        real, drawn = normal(4)[rows], normal(3, seed=number)[rows]
        false = generator.predict(drawn, verbose=0)
        labels = np.concatenate([np.ones((7, 1)), np.zeros((7, 1))]).astype("float32")
        found.append(discriminator.train_on_batch(np.concatenate([real, false]), labels, return_dict=True))
        found.append(both.train_on_batch(drawn, np.ones((7, 1), "float32"), return_dict=True))
    return found, state(both), state(discriminator)


def deterministic_policy(strategy):
    """Deep deterministic policy gradients: an actor and a critic, targets that follow softly, in a traced loop of one's own."""
    with strategy.scope():
        actor, critic = mlp(6, 2), mlp(6, 1, inputs=6)
        followers = [mlp(6, 2), mlp(6, 1, inputs=6)]
        optimizers = [keras.optimizers.Adam(0.005, epsilon=1e-3), keras.optimizers.Adam(0.01, epsilon=1e-3)]
    for follower, leader in zip(followers, (actor, critic), strict=True):
        follower.set_weights(leader.get_weights())

    def on_rank(x, action, reward, following):
        wanted = reward + 0.9 * followers[1](tf.concat([following, followers[0](following)], 1))
        with tf.GradientTape() as tape:
            error = wanted - critic(tf.concat([x, action], 1), training=True)
            of_critic = tf.nn.compute_average_loss(tf.reduce_sum(error**2, 1), global_batch_size=BATCH)
        optimizers[1].apply(tape.gradient(of_critic, critic.trainable_variables), critic.trainable_variables)
        with tf.GradientTape() as tape:
            value = critic(tf.concat([x, tf.tanh(actor(x, training=True))], 1))
            of_actor = -tf.reduce_sum(value) / BATCH
        optimizers[0].apply(tape.gradient(of_actor, actor.trainable_variables), actor.trainable_variables)
        for follower, leader in zip(followers, (actor, critic), strict=True):
            for slow, fast in zip(follower.trainable_variables, leader.trainable_variables, strict=True):
                slow.assign(0.8 * tf.convert_to_tensor(slow) + 0.2 * tf.convert_to_tensor(fast))
        return of_critic, of_actor

    @tf.function
    def step(batch):
        return [strategy.reduce("SUM", loss, axis=None) for loss in strategy.run(on_rank, batch)]

    data = (normal(4), normal(2, seed=2), normal(1, seed=3), normal(4, seed=5))
    batches = tf.data.Dataset.from_tensor_slices(data).batch(BATCH).repeat(2)
    found = []
    for batch in strategy.experimental_distribute_dataset(batches):
        found += [[float(loss) for loss in step(batch)], actor(data[0][:1]).numpy()]
    return found, [net.get_weights() for net in (actor, critic, *followers)]


def actor_critic(strategy):
    """keras.io's actor and critic: an eager tape over an episode, whose actions are chosen by eager calls."""
    rng = np.random.default_rng(3)
    with strategy.scope():
        inputs = keras.Input((4,))
        hidden = layers.Dense(6, "relu")(inputs)
        model = keras.Model(inputs, [layers.Dense(2, "softmax")(hidden), layers.Dense(1)(hidden)])
        optimizer, huber = keras.optimizers.Adam(0.01, epsilon=1e-3), keras.losses.Huber()
    found, position = [], rng.normal(size=4).astype("float32")
    for _ in range(2):
        with tf.GradientTape() as tape:
            chances, values, rewards = [], [], []
            for _ in range(4):
                of_actions, value = model(position[None])
                action = int(rng.random() > float(of_actions[0, 0]))
                chances.append(tf.math.log(of_actions[0, action]))
                values.append(value[0, 0])
                position = (0.9 * position + 0.3 * (action - 0.5)).astype("float32")
                rewards.append(float(-np.abs(position).sum()))
            returns = np.cumsum(rewards[::-1])[::-1]
            losses = [-chance * (r - value) for chance, value, r in zip(chances, values, returns, strict=True)]
            losses += [huber(value[None], tf.constant([r], tf.float32)) for value, r in zip(values, returns, strict=True)]
            loss = sum(losses)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        found.append(float(loss))
    return found, model.get_weights(), [variable.numpy() for variable in optimizer.variables]


def growing(strategy):
    """Progressive: a model is trained, another is put on top of its layers, and both learn at rates of their own."""
    with strategy.scope():
        low = mlp(5, 3)
        low.compile(sgd(), "mse")
    found = [fitted(low, normal(4), normal(3, seed=2))]
    with strategy.scope():
        rows = keras.Input((4,))
        hidden = low.layers[0](rows)
        high = keras.Model(rows, layers.Add()([low(rows), layers.Dense(3)(layers.Dense(5, "relu")(hidden))]))
        slow = [*low.trainable_variables]
        fast = [v for v in high.trainable_variables if not any(v is other for other in slow)]
        optimizers = [keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.01, epsilon=1e-3)]

    class Rates(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            of_slow, of_fast = tape.gradient(loss, [slow, fast])
            optimizers[0].apply_gradients(zip(of_slow, slow, strict=True))
            optimizers[1].apply_gradients(zip(of_fast, fast, strict=True))
            return {"loss": loss}

    with strategy.scope():
        model = Rates(high.inputs, high.outputs)
        model.compile(loss="mse")
    history = model.fit(normal(4), normal(3, seed=2), batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return found, history, model.get_weights(), [v.numpy() for optimizer in optimizers for v in optimizer.variables]


class Multitask(keras.Model):
    """A shared trunk, three heads, batches whose labels are of one task at a time: others count nothing."""

    def __init__(self):
        super().__init__()
        self.trunk, self.heads = mlp(6, 5), [layers.Dense(1) for _ in range(3)]

    def call(self, x):
        hidden = self.trunk(x)
        return ops.concatenate([head(hidden) for head in self.heads], 1)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        target, task = y
        chosen = ops.one_hot(task, 3)
        error = ops.sum(ops.square(y_pred - target[:, None]) * chosen, 1)
        return ops.mean(error) + 1e-2 * sum(ops.sum(ops.square(head.kernel)) for head in self.heads)


def one_task_at_a_time(strategy):
    with strategy.scope():
        model = Multitask()
        model.compile(adam())
    return fitted(model, normal(4), (normal(seed=2), integers(3)))


PROGRAMS = (
    shared_layers, autoencoder_then_classifier, adversaries_batch_by_batch, deterministic_policy, actor_critic, growing,
    one_task_at_a_time,
)  # fmt: skip


@pytest.mark.parametrize(
    ("program", "zero_stage", "devices"),
    [exhaustive(program, stage, devices) for program in PROGRAMS for stage, devices in ((0, 4), (3, 2))],
)
def test_it_is_one_device(program, zero_stage, devices):
    assert_as_on_one_device(program, zero_stage, devices)
