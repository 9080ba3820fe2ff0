"""A `train_step` that makes gradients itself: of gradients of rows, or of weights that it hands to a model as tensors."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers

from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device

pytestmark = pytest.mark.as_traced

ROWS, BATCH = 22, 8  # the last batch has 6 rows


class Model(keras.Model):
    """A table of seven rows, of which each example has three, and a net; `made_by(model, ids, y)` returns loss and gradients."""

    made_by = None

    def __init__(self):
        super().__init__()
        self.table = self.add_weight(shape=(7, 4), initializer="glorot_uniform", name="table")
        self.hidden, self.head = layers.Dense(5, "tanh"), layers.Dense(2)
        self.hidden.build((None, 4))
        self.head.build((None, 5))
        self.built = True

    def looked_up(self, ids):
        return tf.gather(tf.convert_to_tensor(self.table), tf.reshape(ids, [-1]))

    def error_of(self, rows, y):
        found = self.head(self.hidden(tf.reduce_mean(tf.reshape(rows, [-1, 3, 4]), 1)))
        return tf.reduce_mean(tf.reduce_sum((found - y) ** 2, -1))

    def train_step(self, data):
        loss, grads = type(self).made_by(self, *data)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


def slices_of_rows(model, ids, y):
    """The table's gradient as IndexedSlices, of the gradient of the rows that were looked up."""
    rows = model.looked_up(ids)
    with tf.GradientTape() as tape:
        tape.watch(rows)
        loss = model.error_of(rows, y)
    of_rows, *others = tape.gradient(loss, [rows, *model.trainable_variables[1:]])
    return loss, [tf.IndexedSlices(of_rows, tf.reshape(ids, [-1]), tf.constant([7, 4])), *others]


def chain_rule(model, ids, y):
    """The hidden layer's gradient by a formula, of that of what it returns, in a step that adds decay to another's."""
    _, kernel, bias, head, head_bias = model.trainable_variables
    x = tf.reduce_mean(tf.reshape(model.looked_up(ids), [-1, 3, 4]), 1)
    hidden = model.hidden(x)
    with tf.GradientTape() as tape:
        tape.watch(hidden)
        loss = tf.reduce_mean(tf.reduce_sum((model.head(hidden) - y) ** 2, -1))
    of_hidden, of_head, of_bias = tape.gradient(loss, [hidden, head, head_bias])
    steep = of_hidden * (1 - hidden**2)
    return loss, [
        tf.zeros(model.table.shape),
        tf.matmul(x, steep, transpose_a=True),
        tf.reduce_sum(steep, 0),
        of_head + 0.1 * tf.convert_to_tensor(head),
        of_bias,
    ]


def rows_clipped_one_by_one(model, ids, y):
    """As `slices_of_rows`, with the gradient of each row clipped."""
    loss, (of_table, *others) = slices_of_rows(model, ids, y)
    values = tf.clip_by_norm(of_table.values, 0.02, axes=[1])
    return loss, [tf.IndexedSlices(values, of_table.indices, of_table.dense_shape), *others]


def decayed_rows(model, ids, y):
    """Decay is added to the gradients that are made of gradients of rows."""
    loss, (of_table, *others) = slices_of_rows(model, ids, y)
    return loss, [tf.convert_to_tensor(of_table) + 0.1 * tf.convert_to_tensor(model.table), *others]


def clipped_together(model, ids, y):
    """The norm is of gradients by the chain rule, as IndexedSlices, and of a tape's."""
    _, kernel, bias, head, head_bias = model.trainable_variables
    rows = model.looked_up(ids)
    x = tf.reduce_mean(tf.reshape(rows, [-1, 3, 4]), 1)
    hidden = model.hidden(x)
    with tf.GradientTape() as tape:
        tape.watch(hidden)
        loss = tf.reduce_mean(tf.reduce_sum((model.head(hidden) - y) ** 2, -1))
    of_hidden, *of_head = tape.gradient(loss, [hidden, head, head_bias])
    steep = of_hidden * (1 - hidden**2)
    of_rows = tf.repeat(tf.matmul(steep, tf.convert_to_tensor(kernel), transpose_b=True) / 3, 3, axis=0)
    of_table = tf.convert_to_tensor(tf.IndexedSlices(of_rows, tf.reshape(ids, [-1]), tf.constant([7, 4])))
    of_kernel, of_bias = tf.matmul(x, steep, transpose_a=True), tf.reduce_sum(steep, 0)
    grads, norm = tf.clip_by_global_norm([of_table, of_kernel, of_bias, *of_head], 0.4)
    return loss + 0.01 * norm, grads


def both_ways(model, ids, y):
    """The sum of what a tape returns for a weight and of what the chain rule gives."""
    kernel, bias, *others = model.trainable_variables[1:]
    x = tf.reduce_mean(tf.reshape(model.looked_up(ids), [-1, 3, 4]), 1)
    with tf.GradientTape(persistent=True) as tape:
        hidden = model.hidden(x)
        loss = tf.reduce_mean(tf.reduce_sum((model.head(hidden) - y) ** 2, -1))
        size = tf.reduce_mean(hidden**2)
    of_hidden, *of_head = tape.gradient(loss, [hidden, *others])
    steep = of_hidden * (1 - hidden**2)
    of_kernel, of_bias = tape.gradient(size, [kernel, bias])
    return loss, [
        tf.zeros(model.table.shape),
        tf.matmul(x, steep, transpose_a=True) + 0.5 * of_kernel,
        tf.reduce_sum(steep, 0) - of_bias,
        *of_head,
    ]


def of_weights_as_tensors(model, ids, y):
    """A function of weights, whose gradients are clipped together and decayed, as in JAX."""
    weights = [tf.convert_to_tensor(variable) for variable in model.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        table, kernel, bias, head, head_bias = weights
        x = tf.reduce_mean(tf.reshape(tf.gather(table, tf.reshape(ids, [-1])), [-1, 3, 4]), 1)
        loss = tf.reduce_mean(tf.reduce_sum((tf.tanh(x @ kernel + bias) @ head + head_bias - y) ** 2, -1))
    return loss, [tf.convert_to_tensor(grad) for grad in tape.gradient(loss, weights)]


def of_weights_clipped(model, ids, y):
    loss, grads = of_weights_as_tensors(model, ids, y)
    grads = [grad + 0.1 * tf.convert_to_tensor(v) for grad, v in zip(grads, model.trainable_variables, strict=True)]
    return loss, tf.clip_by_global_norm(grads, 0.5)[0]


def against_an_adversary(model, ids, y):
    """Gradients of variables, at rows that a step along their gradient has moved: which are a device's own mean's, as ever."""
    rows = model.looked_up(ids)
    with tf.GradientTape() as tape:
        tape.watch(rows)
        loss = model.error_of(rows, y)
    moved = rows + 0.1 * tf.sign(tape.gradient(loss, rows))
    with tf.GradientTape() as tape:
        loss = model.error_of(moved, y)
    others = tape.gradient(loss, model.trainable_variables[1:])
    return loss, [tf.zeros(model.table.shape), *others]


@tf.custom_gradient
def clipped_on_the_way_back(x):
    return x, lambda upstream: tf.clip_by_norm(tf.clip_by_value(upstream, -0.05, 0.02), 0.04, axes=[-1])


def not_linear_in_what_comes_back(model, ids, y):
    """A `tf.custom_gradient` that clips each number and each row."""
    with tf.GradientTape() as tape:
        hidden = model.hidden(tf.reduce_mean(tf.gather(tf.convert_to_tensor(model.table), ids), 1))
        loss = tf.reduce_mean(tf.reduce_sum((model.head(clipped_on_the_way_back(hidden)) - y) ** 2, -1))
    return loss, tape.gradient(loss, model.trainable_variables)


def _of_every_row(model, ids, y):
    """Gradients by what the layers return, of a loss with a value for each row; and what went into the layers."""
    x = tf.reduce_mean(tf.reshape(model.looked_up(ids), [-1, 3, 4]), 1)
    hidden = model.hidden(x)
    with tf.GradientTape() as tape:
        tape.watch(hidden)
        found = model.head(hidden)
        tape.watch(found)
        losses = tf.reduce_sum((found - y) ** 2, -1)
    of_hidden, of_found = tape.gradient(losses, [hidden, found])
    return losses, (x, of_hidden * (1 - hidden**2)), (hidden, of_found)


def _products(*pairs):
    return [grad for x, steep in pairs for grad in (tf.matmul(x, steep, transpose_a=True), tf.reduce_sum(steep, 0))]


def divided_by_the_rows(model, ids, y):
    """Sums over rows, divided by the number of rows; one of them by a factor, and one before it is summed, with decay added."""
    losses, of_hidden, (hidden, of_found) = _of_every_row(model, ids, y)
    rows = tf.cast(tf.shape(ids)[0], tf.float32)
    kernel, bias = _products(of_hidden)
    head, head_bias = _products((hidden, of_found / rows))
    return tf.reduce_mean(losses), [
        tf.zeros(model.table.shape),
        kernel / rows,
        (1.0 / rows) * bias,
        head + 0.1 * tf.convert_to_tensor(model.head.kernel),
        head_bias,
    ]


def means_over_rows(model, ids, y):
    """A bias's gradient is a mean over rows, plain or with a decay; a kernel's a mean of outer products."""
    losses, (x, steep), (hidden, of_found) = _of_every_row(model, ids, y)
    return tf.reduce_mean(losses), [
        tf.zeros(model.table.shape),
        tf.reduce_mean(x[:, :, None] * steep[:, None, :], 0),
        tf.reduce_mean(steep, 0) + 0.1 * tf.convert_to_tensor(model.hidden.bias),
        tf.einsum("bi,bo->io", hidden, of_found) / tf.cast(tf.shape(ids)[0], tf.float32),
        keras.ops.mean(of_found, 0),
    ]


STEPS = (
    slices_of_rows,
    chain_rule,
    rows_clipped_one_by_one,
    decayed_rows,
    clipped_together,
    both_ways,
    of_weights_as_tensors,
    of_weights_clipped,
    against_an_adversary,
    not_linear_in_what_comes_back,
    divided_by_the_rows,
    means_over_rows,
)


def fitted(made_by, run_eagerly=False, **arguments):
    def program(strategy):
        rng = np.random.default_rng(4)
        with strategy.scope():
            model = type("Model", (Model,), {"made_by": staticmethod(made_by)})()
            model.compile(keras.optimizers.SGD(0.3, momentum=0.5, **arguments), run_eagerly=run_eagerly)
        x, y = rng.integers(0, 7, size=(ROWS, 3)).astype("int32"), rng.normal(size=(ROWS, 2)).astype("float32")
        return {**model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history, **state(model)}

    program.__name__ = made_by.__name__
    return program


PROGRAMS = {(step, is_eager): fitted(step, is_eager) for step in STEPS for is_eager in (False, True)}
ACCUMULATING = {step: fitted(step, gradient_accumulation_steps=2) for step in (slices_of_rows, of_weights_as_tensors)}


def _grid():
    chosen = {(slices_of_rows, False, 0), (of_weights_clipped, False, 0), (decayed_rows, True, 3)}
    chosen |= {(not_linear_in_what_comes_back, False, 0), (of_weights_clipped, True, 0)}
    for case in itertools.product(STEPS, (False, True), range(4)):
        yield case if case in chosen else exhaustive(*case)


@pytest.mark.parametrize(("made_by", "is_eager", "zero_stage"), _grid())
def test_it_is_one_device(made_by, is_eager, zero_stage):
    assert_as_on_one_device(PROGRAMS[made_by, is_eager], zero_stage)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("made_by", ACCUMULATING)
def test_accumulated(made_by, zero_stage):
    assert_as_on_one_device(ACCUMULATING[made_by], zero_stage)
