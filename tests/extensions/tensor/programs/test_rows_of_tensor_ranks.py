"""Losses and gradients of what tensor-parallel layers have returned: tensor ranks have the same rows, data ranks others."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers
from training import strategy_for

import tfdist
from tests import workers
from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device, run
from tests.programs.gradients.test_custom_gradients_over_rows import limited_one_by_one, limited_over_devices, limited_together
from tests.programs.rows.test_rows_of_collectives import BATCH, ROWS, assert_of_one_device, numbers, paired, squares

pytestmark = pytest.mark.as_traced

# Of a batch, and of what the layers make of it, which may be parallel.
OF_ROWS = {
    "mean": lambda y, p: squares(p) + squares(p - y),
    "sum over the rows": lambda y, p: tf.reduce_sum(p * p) / tf.cast(tf.shape(p)[0], p.dtype),
    "sum": lambda y, p: tf.reduce_sum(p * p) / BATCH,
    "root": lambda y, p: tf.sqrt(squares(p)),
    "product of means": lambda y, p: squares(p) * squares(p - y),
    "mean of some": lambda y, p: squares(tf.boolean_mask(p, p[:, 0] > 0)),
    "first row": lambda y, p: squares(p - y) + p[0, 0],
    "hardest row": lambda y, p: (lambda far: tf.gather(far, tf.argmax(far)))(tf.norm(p - y, axis=-1)),
    "mean prediction": lambda y, p: tf.nn.softmax_cross_entropy_with_logits(tf.ones(4) / 4, tf.reduce_mean(p, 0)),
    "pairs": lambda y, p: paired(p, p),
    "centred": lambda y, p: squares((p - tf.reduce_mean(p, 0)) * p),
    "reversed": lambda y, p: squares(p - p[::-1]),
    "all pairs": lambda y, p: squares(p[:, None] - p[None]),
}


def parallel_layers():
    return keras.Sequential([keras.Input((6,)), tfdist.layers.RowParallelDense(4, activation="tanh")])


def test_tensor_ranks_have_the_same_rows():
    assert_of_one_device(numbers(strategy_for(4, 0, tensor_parallel_size=2), OF_ROWS, parallel_layers), OF_ROWS, parallel_layers)


def of_worker():
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=0, tensor_parallel_size=2)
    return numbers(strategy, OF_ROWS, parallel_layers)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_workers_that_share_memory(tmp_path):
    with workers.job(tmp_path, 4, "tests.extensions.tensor.programs.test_rows_of_tensor_ranks:of_worker") as job:
        for found in job.results(250):
            assert_of_one_device(found, OF_ROWS, parallel_layers)


class Changing(keras.Model):
    """Changes what comes back to what parallel layers have returned, by `change`."""

    def __init__(self, change):
        super().__init__()
        self.first, self.second = parallel_layers(), parallel_layers_of_four()
        self.change = tf.custom_gradient(lambda x: (tf.identity(x), change))
        self.built = True

    def call(self, x):
        return self.second(self.change(self.first(x)))


def parallel_layers_of_four():
    return keras.Sequential([keras.Input((4,)), tfdist.layers.ColumnParallelDense(6), tfdist.layers.RowParallelDense(4)])


def fitted(build, is_known=True):
    def program(strategy):
        rng = np.random.default_rng(4)
        x, y = rng.normal(size=(ROWS, 6)).astype("float32"), rng.normal(size=(ROWS, 4)).astype("float32")
        with strategy.scope():
            model = build()
            model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=is_known)
        return {**model.fit(data, verbose=0).history, **state(model)}

    program.__name__ = "behind parallel layers"
    return program


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("change", "is_told"), [(limited_together, 1), (limited_one_by_one, 0), (limited_over_devices, 0)])
def test_what_comes_back_to_them(change, is_told, is_known):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(fitted(lambda: Changing(change), is_known), strategy_for(4, 0, tensor_parallel_size=2))
    assert len([one for one in found if "tf.custom_gradient" in str(one.message)]) == is_told


class ByHand(keras.Model):
    """Gradients of its last layer by the chain rule, of what parallel layers have returned, with a decay."""

    def __init__(self):
        super().__init__()
        self.parallel, self.head = parallel_layers(), layers.Dense(4)
        self.head.build((None, 4))
        self.built = True

    def call(self, x):
        return self.head(self.parallel(x))

    def train_step(self, data):
        x, y = data
        given = self.parallel(x)
        with tf.GradientTape() as tape:
            found = self.head(given)
            tape.watch(found)
            losses = tf.reduce_mean((found - y) ** 2, -1)
        steep, rows = tape.gradient(losses, found), tf.cast(tf.shape(x)[0], tf.float32)
        of_kernel = tf.matmul(given, steep, transpose_a=True) / rows + 0.1 * tf.convert_to_tensor(self.head.kernel)
        self.optimizer.apply([of_kernel, tf.reduce_sum(steep, 0) / rows], self.head.trainable_variables)
        return {"loss": tf.reduce_mean(losses)}


BY_HAND = {is_known: fitted(ByHand, is_known) for is_known in (False, True)}


@pytest.mark.parametrize(
    ("is_known", "zero_stage"), [(True, 0), *(exhaustive(*case) for case in ((True, 3), (False, 0), (False, 3)))]
)
def test_gradients_by_hand(is_known, zero_stage):
    assert_as_on_one_device(BY_HAND[is_known], zero_stage, 4, tensor_parallel_size=2)
