"""What `output_gradients` gives to a tape, and what a loop assigns of its shares: numbers of all rows, as on one device."""

import functools

import keras
import pytest
import tensorflow as tf

from tests.programs.comparing import assert_as_on_one_device, stages_in_turns
from tests.programs.rows.ways_of_training import FORMS, arrays, batches

pytestmark = pytest.mark.as_traced

FORM = FORMS["uneven"]


def rows_over_their_number(p, y, loss):
    return p, 2.0 * (p - y) / tf.cast(tf.shape(y)[0], p.dtype)


def rows_over_their_norm(p, y, loss):
    return p, (p - y) / tf.norm(p - y)


def centred_rows(p, y, loss):
    return p, p - tf.reduce_mean(p, 0)


def a_root_of_the_loss(p, y, loss):
    return loss, tf.sqrt(loss)


def the_loss(p, y, loss):
    return loss, loss


def another_tapes(p, y, loss):
    with tf.GradientTape() as tape:
        tape.watch(p)
        found = tf.sqrt(tf.reduce_mean(tf.square(p - y)))
    return p, tape.gradient(found, p)


class Begun(keras.Model):
    def __init__(self, begin):
        super().__init__()
        self.head = keras.layers.Dense(FORM.units, "tanh", kernel_initializer=keras.initializers.GlorotUniform(seed=4))
        self.head.build((None, FORM.features))
        self.begin, self.built = begin, True

    def call(self, x):
        return self.head(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x)
            loss = tf.reduce_mean(tf.square(p - y))
            target, seed = self.begin(p, y, loss)
        grads = tape.gradient(target, self.trainable_variables, output_gradients=seed)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


def trained(strategy, begin, run_eagerly):
    with strategy.scope():
        model = Begun(begin)
        model.compile(keras.optimizers.SGD(0.03, momentum=0.9), run_eagerly=run_eagerly)
    logs = model.fit(batches(FORM, *arrays(FORM)), epochs=2, verbose=0).history
    return logs, [v.numpy() for v in (*model.weights, *model.optimizer.variables)]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("begin", "zero_stage"),
    stages_in_turns([rows_over_their_number, rows_over_their_norm, centred_rows, a_root_of_the_loss, the_loss, another_tapes]),
)
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_output_gradients(begin, zero_stage, run_eagerly):
    program = functools.partial(trained, begin=begin, run_eagerly=run_eagerly)
    assert_as_on_one_device(named(program, begin), zero_stage)


def named(program, function):
    program.__name__ = function.__name__
    return program


def beside_a_constant(kernel, number, share):
    number.assign(1.0 + share)


def an_average_that_moves(kernel, number, share):
    number.assign(0.9 * number + 0.1 * share)


def products(kernel, number, share):
    number.assign((number + 1.0) * (1.0 - 0.01 * share))


def decayed(kernel, number, share):
    kernel.assign(kernel * (1.0 - 0.01 * share))


def looped(strategy, assign):
    with strategy.scope():
        layer = keras.layers.Dense(FORM.units, kernel_initializer=keras.initializers.GlorotUniform(seed=4))
        layer.build((None, FORM.features))
        number = keras.Variable(0.0, dtype="float64", trainable=False, name="number")

    def on_rank(x, y):
        assign(layer.kernel, number, tf.reduce_sum(tf.square(layer(x) - y)) / (FORM.batch * FORM.units))

    @tf.function
    def step(x, y):
        strategy.run(on_rank, args=(x, y))

    for batch in strategy.experimental_distribute_dataset(batches(FORM, *arrays(FORM))):
        step(*batch)
    return [v.numpy() for v in (layer.kernel, number)]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("assign", "zero_stage"), stages_in_turns([beside_a_constant, an_average_that_moves, products, decayed]))
def test_assigned_shares_of_a_loop(assign, zero_stage):
    assert_as_on_one_device(named(functools.partial(looped, assign=assign), assign), zero_stage)
