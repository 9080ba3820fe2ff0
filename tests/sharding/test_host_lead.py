"""The host is held back behind the device, and collectives begin in no order among each other: as over NCCL. Between processes
they stand on a chain.

Here TensorFlow's ring does so, on logical CPUs, where numbers can be compared.
"""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import training
from tfdist.collectives import RING
from tfdist.sharding import host_lead

GROUPS, BUCKETS = 5, 7  # of the model's parameters, and of its gradients, in the sizes below


@pytest.fixture
def as_over_nccl(monkeypatch):
    monkeypatch.setattr(type(RING), "has_own_turns", True)
    monkeypatch.setattr(type(RING), "waits_for_queue", True)


@pytest.fixture
def as_between_processes(monkeypatch):
    monkeypatch.setattr(type(RING), "waits_for_queue", True)


@pytest.fixture
def holds(monkeypatch):
    """Returns, per call, the names of what is held back and of what it waits for."""
    found = []
    held_back = host_lead.run_when_done

    def note(held, operations, program, kind):
        found.append(([one.name for one in held], [one.name for one in operations], kind))
        held_back(held, operations, program, kind)

    monkeypatch.setattr(host_lead, "run_when_done", note)
    return found


def fit_and_compare(zero_stage, **settings):
    """Trains on two devices and compares with one, two steps in each call of TensorFlow; returns the strategy."""
    expected = training.fit(training.one_device(), model, keras.optimizers.Adam, epochs=2)
    expected.losses = expected.losses[1::2]
    strategy = training.strategy_for(2, zero_stage, bucket_bytes=600, group_bytes=600, **settings)
    actual = training.fit(strategy, model, keras.optimizers.Adam, epochs=2, steps_per_execution=2)
    training.assert_same(actual, expected, rtol=1e-4)
    return strategy


def model():
    widths = (17, 13, 11, 9)
    layers = [keras.layers.Dense(width, activation="tanh", name=f"dense_{width}") for width in widths]
    return keras.Sequential([keras.Input((training.FEATURES,)), *layers, keras.layers.Dense(training.CLASSES)])


@pytest.mark.parametrize("zero_stage", [2, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (0, 1, 3))])
def test_numbers_are_those_of_one_device(as_over_nccl, holds, zero_stage):
    strategy = fit_and_compare(zero_stage)
    assert any("gradient_tape" in name for held, _, _ in holds for name in held)
    # One chain for each key, and none for all: else each collective would begin when the one before it is over.
    keys = strategy.extended.communicator._turns
    assert len(keys) >= 10 and {rank for rank, _ in keys} == {0, 1}


@pytest.mark.parametrize(
    ("zero_stage", "prefetch"),
    [(3, 1), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((0, 1), (1, 1), (2, 1), (3, 0), (3, 2)))],
)
def test_on_a_chain_products_are_queued_in_parts(as_between_processes, holds, zero_stage, prefetch):
    """A part of backward for each collective behind it; in forward, what reads a gather when that is over."""
    strategy = fit_and_compare(zero_stage, prefetch=prefetch)
    assert not strategy.extended.communicator._turns
    kinds = collections.Counter(kind for _, _, kind in holds)
    ranks, gaps = 2, (GROUPS if zero_stage == 3 else BUCKETS) - 1  # between the messages of backward
    if zero_stage == 0:
        assert kinds["lead"] == ranks * gaps
    else:  # what a single operation computes has no two parts
        assert ranks * gaps < kinds["lead"] <= ranks * gaps * 2
    assert kinds["forward"] == (ranks * GROUPS if zero_stage == 3 and prefetch else 0)
    # The last is kept, and nobody asks for the gradient of what the first reads.
    assert kinds["gathers of backward"] == (ranks * (GROUPS - 2) if zero_stage == 3 else 0)


def test_in_a_vectorized_map_nothing_is_held_back(as_over_nccl):
    """TensorFlow makes all rows of it at once, and has no way to do so with what is done on the host."""
    strategy = training.strategy_for(2, 3, group_bytes=600)
    with strategy.scope():
        built = model()
    rows = tf.ones([3, training.FEATURES])

    def each() -> tf.Tensor:
        return tf.vectorized_map(lambda row: tf.reduce_sum(built(row[tf.newaxis])), rows)

    found = tf.function(lambda: strategy.run(each), autograph=False)()
    expected = tf.reduce_sum(built(rows), axis=1)
    for local in strategy.experimental_local_results(found):
        np.testing.assert_allclose(local, expected, rtol=1e-5)


def test_nothing_is_held_back_where_collectives_wait_for_their_input_alone(holds):
    training.fit(training.strategy_for(2, 2, bucket_bytes=600), model, keras.optimizers.Adam)
    assert holds == []
