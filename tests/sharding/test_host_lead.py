"""The host is held back behind the device in backward, and collectives begin in no order among each other: as over NCCL.

Here TensorFlow's ring does so, on logical CPUs, where numbers can be compared.
"""

import keras
import pytest

from tests import training
from tfdist.collectives import RING
from tfdist.sharding import host_lead


@pytest.fixture
def as_over_nccl(monkeypatch):
    monkeypatch.setattr(type(RING), "has_own_turns", True)
    monkeypatch.setattr(type(RING), "waits_for_queue", True)


@pytest.fixture
def holds(monkeypatch):
    """Returns, per call, the names of what is held back and of what it waits for."""
    found = []
    held_back = host_lead.run_when_done

    def note(held, operation, program):
        found.append(([one.name for one in held], operation.name))
        held_back(held, operation, program)

    monkeypatch.setattr(host_lead, "run_when_done", note)
    monkeypatch.setattr("tfdist.sharding.unshard.run_when_done", note)
    return found


def model():
    widths = (17, 13, 11, 9)
    layers = [keras.layers.Dense(width, activation="tanh", name=f"dense_{width}") for width in widths]
    return keras.Sequential([keras.Input((training.FEATURES,)), *layers, keras.layers.Dense(training.CLASSES)])


@pytest.mark.parametrize("zero_stage", [*(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (0, 1)), 2, 3])
def test_numbers_are_those_of_one_device(as_over_nccl, holds, zero_stage):
    settings = {"bucket_bytes": 600, "group_bytes": 600}
    expected = training.fit(training.one_device(), model, keras.optimizers.Adam, epochs=2)
    expected.losses = expected.losses[1::2]
    strategy = training.strategy_for(2, zero_stage, **settings)
    actual = training.fit(strategy, model, keras.optimizers.Adam, epochs=2, steps_per_execution=2)
    training.assert_same(actual, expected, rtol=1e-4)
    assert any("gradient_tape" in name for held, _ in holds for name in held)
    # One chain for each key, and none for all: else each collective would begin when the one before it is over.
    keys = strategy.extended.communicator._turns
    assert len(keys) >= 10 and {rank for rank, _ in keys} == {0, 1}


def test_nothing_is_held_back_on_the_chain(holds):
    training.fit(training.strategy_for(2, 2, bucket_bytes=600), model, keras.optimizers.Adam)
    assert holds == []
