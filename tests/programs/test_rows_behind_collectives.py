"""Losses and gradients of what collectives have returned: tensor ranks have the same rows, data ranks others."""

import functools
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
from tests.programs.test_rows_that_meet_going_back import limited_one_by_one, limited_over_devices, limited_together
from tfdist.collectives import all_gather, all_reduce, rank_program
from tfdist.placements.repair import Repair

pytestmark = pytest.mark.as_traced

ROWS, BATCH = 20, 8


def squares(x):
    return tf.reduce_mean(x**2)


def paired(x, others):
    return squares(tf.matmul(x, others, transpose_b=True))


def over_all(x):
    """Returns the sum of `x` over data ranks; the only one's is its own."""
    return x if rank_program() is None else all_reduce(x)


def of_all(x):
    return x if rank_program() is None else all_gather(x, uneven=True)


def from_the_mean(p):
    return p - tf.stop_gradient(over_all(tf.reduce_sum(p, 0)) / over_all(tf.cast(tf.shape(p)[0], tf.float32)))


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
# Of what data ranks have reduced or gathered: of no rank's own rows.
OF_ALL = {
    "from the mean of all": lambda y, p: squares(from_the_mean(p)),
    "and from its own": lambda y, p: squares(from_the_mean(p) - tf.reduce_mean(from_the_mean(p) ** 2, 0)),
    "pairs with those of all": lambda y, p: paired(p, of_all(p)),
    "divided by a root of all": lambda y, p: squares(p - y) / tf.sqrt(squares(of_all(p))),
    "times a sum of all": lambda y, p: squares(p - y) * over_all(tf.reduce_sum(p * p)),
}

KINDS = {"any rows": BATCH - 1, "known rows": BATCH}


def parallel_layers():
    return keras.Sequential([keras.Input((6,)), tfdist.layers.RowParallelDense(4, activation="tanh")])


def arrays(rows):
    rng = np.random.default_rng(2)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 4)).astype("float32")


def numbers(strategy, losses):
    """Returns what each of `losses` is of all rows, on each rank, where the trace knows the number of rows, and where not.

    None: it is not known.
    """
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = parallel_layers()
    found, lost = {}, set()

    def on_rank(kind, x, y):
        p, repair = model(x), rank_program().part(Repair)
        whole = {name: repair.whole(loss(y, p), "loss") for name, loss in losses.items()}
        lost.update((name, kind) for name, x in whole.items() if x is None)
        return {name: x for name, x in whole.items() if x is not None}

    for kind, rows in KINDS.items():
        data = tf.data.Dataset.from_tensor_slices(arrays(rows)).batch(BATCH, drop_remainder=kind == "known rows")
        batches = iter(strategy.experimental_distribute_dataset(data))
        of_kind = functools.partial(on_rank, kind)
        step = tf.function(functools.partial(strategy.run, of_kind), input_signature=[batches.element_spec], autograph=False)
        left = step(next(batches))
        for name, value in left.items():
            found[name, kind] = [float(x) for x in strategy.experimental_local_results(value)]
    return {**found, **dict.fromkeys(lost)}


def assert_of_one_device(found, losses):
    keras.utils.set_random_seed(3)
    model = parallel_layers()
    for kind, rows in KINDS.items():
        x, y = map(tf.constant, arrays(rows))
        for name, loss in losses.items():
            assert found[name, kind] is not None, (name, kind)
            expected = float(loss(y, model(x)))
            np.testing.assert_allclose(found[name, kind], expected, rtol=1e-5, err_msg=f"{name}, {kind}")


def test_tensor_ranks_have_the_same_rows():
    assert_of_one_device(numbers(strategy_for(4, 0, tensor_parallel_size=2), OF_ROWS), OF_ROWS)


def test_data_ranks_have_others():
    assert_of_one_device(numbers(strategy_for(2, 0), OF_ALL), OF_ALL)


def of_worker(tensor_parallel_size=1):
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=0, tensor_parallel_size=tensor_parallel_size)
    return numbers(strategy, OF_ROWS if tensor_parallel_size > 1 else OF_ALL)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "tensor_parallel_size", "losses"), [(2, 1, OF_ALL), (4, 2, OF_ROWS)])
def test_workers_that_share_memory(tmp_path, number, tensor_parallel_size, losses):
    target = "tests.programs.test_rows_behind_collectives:of_worker"
    with workers.job(tmp_path, number, target, tensor_parallel_size) as job:
        for found in job.results(250):
            assert_of_one_device(found, losses)


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
