"""Losses of what collectives have returned of the rows of all data ranks: of one device's numbers, on each rank."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from training import strategy_for

import tfdist
from tests import workers
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


# Of what data ranks have reduced or gathered: of no rank's own rows.
OF_ALL = {
    "from the mean of all": lambda y, p: squares(from_the_mean(p)),
    "and from its own": lambda y, p: squares(from_the_mean(p) - tf.reduce_mean(from_the_mean(p) ** 2, 0)),
    "pairs with those of all": lambda y, p: paired(p, of_all(p)),
    "divided by a root of all": lambda y, p: squares(p - y) / tf.sqrt(squares(of_all(p))),
    "times a sum of all": lambda y, p: squares(p - y) * over_all(tf.reduce_sum(p * p)),
}

KINDS = {"any rows": BATCH - 1, "known rows": BATCH}


def one_layer():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="tanh")])


def arrays(rows):
    rng = np.random.default_rng(2)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 4)).astype("float32")


def numbers(strategy, losses, build=one_layer):
    """Returns what each of `losses` is of all rows, on each rank, where the trace knows the number of rows, and where not.

    None: it is not known.
    """
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build()
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


def assert_of_one_device(found, losses, build=one_layer):
    keras.utils.set_random_seed(3)
    model = build()
    for kind, rows in KINDS.items():
        x, y = map(tf.constant, arrays(rows))
        for name, loss in losses.items():
            assert found[name, kind] is not None, (name, kind)
            expected = float(loss(y, model(x)))
            np.testing.assert_allclose(found[name, kind], expected, rtol=1e-5, err_msg=f"{name}, {kind}")


def test_data_ranks_have_others():
    assert_of_one_device(numbers(strategy_for(2, 0), OF_ALL), OF_ALL)


def of_worker():
    return numbers(tfdist.MultiWorkerShardedStrategy(zero_stage=0), OF_ALL)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_workers_that_share_memory(tmp_path):
    with workers.job(tmp_path, 2, "tests.programs.rows.test_rows_of_collectives:of_worker") as job:
        for found in job.results(250):
            assert_of_one_device(found, OF_ALL)
