"""Losses that compute in a branch, a `tf.cond` or what AutoGraph makes of `if`, what needs numbers of the whole batch."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import FEATURES, strategy_for, vectors

from tests.parity.comparison import state
from tests.programs.comparing import SHARDED, assert_as_on_one_device, run

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(180), pytest.mark.usefixtures("float64")]

ROWS, BATCH, UNITS = 37, 12, 9  # the last batch has 1 row
X = vectors(ROWS)[0]
Y = np.random.default_rng(1).random((ROWS, UNITS))


class Trained(keras.Model):
    """Two layers, trained with `loss(model, y, p, turn)`; `turn` is true in every second step."""

    def __init__(self, loss):
        super().__init__()
        self.first, self.second = keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(UNITS)
        self.loss_of = loss
        self.steps = self.add_weight(name="steps", shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones", trainable=False)

    def call(self, x):
        self.hidden = self.first(x)
        return self.second(self.hidden)

    def train_step(self, data):
        x, y = data
        self.given = x
        self.steps.assign_add(1)
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = self.loss_of(self, y, p, tf.equal(self.steps.value % 2, 0))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def fitted(loss, y=Y, kind=Trained):
    def program(strategy):
        with strategy.scope():
            model = kind(loss)
            model(tf.zeros([1, FEATURES]))
            model.compile(keras.optimizers.Adam(0.01))
        found = []
        record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: found.append(float(logs["loss"])))
        model.fit(X, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[record])
        return found, state(model)

    return program


def mse(y, p):
    return tf.reduce_mean(tf.square(y - p))


def if_elif_else(model, y, p, turn):
    error = mse(y, p)
    if error > 0.9:
        found = tf.sqrt(error) + tf.math.reduce_std(p)
    elif error > 0.7:
        found = tf.exp(error) - 1.0
    elif turn:
        found = error * tf.math.reduce_variance(p)
    else:
        found = tf.reduce_max(tf.abs(y - p))
    return found


def with_weights(model, y, p, turn):
    """Calls a layer, and reads a variable, in the branch."""

    def called():
        return model.scale * tf.sqrt(mse(y, model.second(tf.square(model.hidden))))

    return tf.cond(turn, called, lambda: mse(y, p))


def several_in_one(model, y, p, turn):
    """Branches one behind the other in a branch, of which a tensor of numbers comes out."""

    def inner():
        centred = tf.cond(tf.reduce_max(p) > 0.5, lambda: p - tf.reduce_mean(p, axis=0), lambda: p)
        scaled = tf.cond(mse(y, centred) > 0.5, lambda: centred / tf.math.reduce_std(centred, axis=0), lambda: centred)
        return tf.sqrt(tf.reduce_mean(tf.square(scaled - y), axis=0))

    return tf.reduce_sum(tf.cond(turn, inner, lambda: tf.reduce_mean(tf.square(p - y), axis=0)))


def one_behind_the_other(model, y, p, turn):
    """Twelve branches, each of what the one before has made."""
    found = mse(y, p)
    for number in range(12):
        found = tf.cond(found > 0.3 + 0.1 * number, lambda: tf.sqrt(mse(y, p)), lambda x=found: x + tf.sqrt(mse(y, 0.5 * p)))
    return found


def of_keras(model, y, p, turn):
    """Losses of Keras in branches, and a function of one."""
    plain, huber = keras.losses.MeanSquaredError(), keras.losses.Huber()
    return tf.cond(
        turn, lambda: tf.sqrt(plain(y, p)), lambda: keras.ops.cond(mse(y, p) > 0.6, lambda: huber(y, p), lambda: plain(y, p))
    )


def weighted_of_keras(model, y, p, turn):
    """Sums of weights are sent in the branches."""
    loss = keras.losses.MeanSquaredError()
    return tf.cond(turn, lambda: loss(y, p, sample_weight=y[:, 0]), lambda: 0.5 * loss(y, p))


def selected(model, y, p, turn):
    """A mean over selected rows, for which no batch has to have one."""
    chosen = y[:, 0] > 0.9

    def some():
        return tf.reduce_mean(tf.boolean_mask(tf.square(y - p), chosen))

    return 0.1 * mse(y, p) + tf.cond(tf.reduce_any(chosen), some, lambda: tf.zeros([], p.dtype))


def lazily_penalised(model, y, p, turn):
    """The gradients by inputs are penalised in every second step, as StyleGAN 2 does."""

    def penalty():
        with tf.GradientTape() as tape:
            tape.watch(model.given)
            again = model(model.given)
        return tf.reduce_mean(tf.reduce_sum(tf.square(tape.gradient(again, model.given)), axis=1))

    return mse(y, p) + tf.cond(turn, penalty, lambda: tf.zeros([], p.dtype))


def calls_the_model(model, y, p, turn):
    """Layers of both branches read their weights there, and once more behind them."""
    x, hidden = model.given, model.hidden
    roots = tf.cond(turn, lambda: tf.sqrt(mse(y, model(x))), lambda: mse(y, model.second(model.first(2.0 * x))))
    return roots + tf.sqrt(mse(y, model.second(0.5 * hidden)))


LOSSES = (
    tf.autograph.to_graph(if_elif_else),
    with_weights,
    several_in_one,
    one_behind_the_other,
    of_keras,
    selected,
    lazily_penalised,
    calls_the_model,
)


@pytest.mark.parametrize(
    ("loss", "zero_stage"),
    [
        (loss, stage) if stage == 3 * (place % 2) else exhaustive(loss, stage)
        for place, loss in enumerate(LOSSES)
        for stage in range(4)
    ],
)
def test_it_is_one_device(loss, zero_stage):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_as_on_one_device(fitted(loss), zero_stage, 3 if zero_stage else 2)


@pytest.mark.parametrize("zero_stage", SHARDED)
def test_losses_that_send_in_a_branch(zero_stage):
    assert_as_on_one_device(fitted(weighted_of_keras), zero_stage)


def masked(model, y, p, turn):
    mask = tf.cast(y > 0.5, p.dtype)
    total = tf.reduce_sum(mask)
    return tf.cond(total > 0.0, lambda: tf.reduce_sum(mask * tf.square(y - p)) / total, lambda: tf.zeros([], p.dtype))


def several_roots(model, y, p, turn):
    def sum_of_roots():
        return tf.sqrt(mse(y, p)) + tf.sqrt(mse(y, 2.0 * p))

    return tf.cond(turn, sum_of_roots, lambda: tf.sqrt(mse(y, 0.5 * p)))


def test_what_is_not_taken_is_not_computed():
    """No batch has a number that counts: a quotient by nothing would make weights NaN."""
    nothing = fitted(masked, np.zeros_like(Y))
    assert_as_on_one_device(nothing, 3)
    losses, _ = run(nothing, strategy_for(2, 3))
    assert losses == [0.0] * len(losses)


def test_the_plan_lists_what_is_agreed_on():
    def sent(loss):
        strategy = strategy_for(2, 0)
        run(fitted(loss), strategy)
        return [(record.op, record.shape) for record in strategy.last_plan.records[0] if record.label.startswith("agree/")]

    assert sent(lambda model, y, p, turn: tf.cond(turn, lambda: mse(y, p), lambda: 0.5 * mse(y, p))) == []
    assert sent(masked) == [("all_reduce", (1,))]  # the mask's sum: over that, another sum is one still
    assert sent(several_roots) == [("all_reduce", (3,))]  # of both branches, of one of which the others are zero


def of_pairs(model, y, p, turn):
    return tf.cond(turn, lambda: tf.reduce_mean(tf.nn.log_softmax(tf.matmul(p, y, transpose_b=True))), lambda: mse(y, p))


def written_since(model, y, p, turn):
    found = tf.cond(turn, lambda: model.scale * tf.sqrt(mse(y, p)), lambda: mse(y, p))
    model.scale.assign(1.1 * model.scale)
    return found


@pytest.mark.parametrize("loss", [of_pairs, written_since])
def test_what_cannot_be_made_again_is_told(loss):
    """Rows that meet in a branch, and a variable that it has read before it was written."""
    with pytest.warns(UserWarning, match="loss of Trained contains"):
        run(fitted(loss), strategy_for(2, 0))


def normalized(model, y, p, turn):
    return tf.cond(turn, lambda: mse(y, model.norm(p, training=True)), lambda: mse(y, p))


def normalized_before(model, y, p, turn):
    """As the error of `normalized` names it."""
    norm = model.norm(p, training=True)
    return tf.cond(turn, lambda: mse(y, norm), lambda: mse(y, p))


class Normalized(Trained):
    def __init__(self, loss):
        super().__init__(loss)
        self.norm = keras.layers.BatchNormalization(synchronized=True)

    def call(self, x):
        return self.norm(super().call(x))


def test_messages_that_have_no_way_back():
    with pytest.raises(NotImplementedError, match="branch"):
        run(fitted(normalized, kind=Normalized), strategy_for(2, 0))
    assert_as_on_one_device(fitted(normalized_before, kind=Normalized), 0)
