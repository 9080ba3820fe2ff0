"""The naive all-reduce: the same sum, and a master's link that carries more with every rank."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import integers, run, strategy_on

from tfdist.collectives import all_reduce, gather_to_master_all_reduce, naive_master_bytes, ring_bytes

pytestmark = pytest.mark.timeout(120)

SHAPE, BYTES = (33, 5), 33 * 5 * 4


def bytes_over_the_link(records):
    """Bytes in and out of one rank when every message travels whole: a broadcast leaves once per receiver."""
    return sum(one.input_bytes * (len(one.ranks) - 1 if one.op == "broadcast" else 1) for one in records)


def naive_and_ring(num_ranks):
    rng = np.random.default_rng(num_ranks)
    values = [integers(rng, SHAPE) for _ in range(num_ranks)]
    strategy = strategy_on(num_ranks)
    naive = run(strategy, gather_to_master_all_reduce, values)
    plan = strategy.last_plan
    ring = run(strategy, all_reduce, values)
    return values, naive, plan, ring, strategy.last_plan


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_both_sum_and_the_master_carries_the_load(num_ranks):
    values, naive, naive_plan, ring, ring_plan = naive_and_ring(num_ranks)
    for rank in range(num_ranks):
        np.testing.assert_array_equal(naive[rank], sum(values))
        np.testing.assert_array_equal(ring[rank], naive[rank])

    assert naive_plan.counts(0) == {"send": num_ranks - 1, "broadcast": 1}
    carried = bytes_over_the_link(naive_plan.records[0])
    assert carried == naive_master_bytes(BYTES, num_ranks) == 2 * (num_ranks - 1) * BYTES

    for rank in range(num_ranks):
        assert ring_plan.counts(rank) == {"all_reduce": 1}
        assert ring_plan.sent_bytes(rank) == pytest.approx(ring_bytes(BYTES, num_ranks), rel=1e-12)
        assert ring_plan.sent_bytes(rank) < 2 * BYTES


def test_growth():
    naive = [naive_master_bytes(BYTES, size) for size in range(1, 65)]
    assert naive == [2 * BYTES * more for more in range(64)]
    ring = [ring_bytes(BYTES, size) for size in range(1, 65)]
    assert ring[0] == 0
    assert max(ring) < 2 * BYTES


def test_the_gradient_is_that_of_a_sum():
    rng = np.random.default_rng(5)
    values, weights = ([integers(rng, (7, 3)) for _ in range(3)] for _ in range(2))

    def rank(x, weight):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(all_reduce(x) * weight)
        return tape.gradient(loss, x)

    for gradient in run(strategy_on(3), rank, values, weights):
        np.testing.assert_array_equal(gradient, sum(weights))
