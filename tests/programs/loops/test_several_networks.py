"""Steps that train several networks, each with an optimizer: WGAN-GP, CycleGAN, a target network of deep Q-learning."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive

from tests.programs.comparing import assert_as_on_one_device
from tests.programs.small_training import BATCH, adam, integers, mlp, normal

pytestmark = pytest.mark.as_traced

FEATURES = 6


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
        model = Wasserstein(adam, critic=mlp(5, 1, inputs=FEATURES), generator=mlp(5, FEATURES, inputs=4))
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
        model = Cycle(adam, **{name: mlp(5, units, inputs=FEATURES) for name, units in nets.items()})
        model.compile()
    data = tf.data.Dataset.from_tensor_slices((normal(FEATURES, seed=1), normal(FEATURES, seed=2))).batch(BATCH)
    return {"history": model.fit(data, verbose=0).history, "weights": model.get_weights()}


def quality(strategy):
    """Deep Q-learning: a target net that gets the other's weights between steps, and eager calls that choose."""
    with strategy.scope():
        net, target = mlp(5, 3, inputs=FEATURES), mlp(5, 3, inputs=FEATURES)
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
    wasserstein,
    cycle,
    quality,
)


@pytest.mark.parametrize(("program", "zero_stage"), [exhaustive(program, stage) for program in PROGRAMS for stage in (0, 3)])
def test_it_is_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)
