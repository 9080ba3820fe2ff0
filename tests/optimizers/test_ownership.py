"""Whole-variable ownership: balanced, reported, and refused for what one rank alone would write.

Its state in files: tests/parity/test_optimizers.py.
"""

import keras
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from training import fit, mlp, strategy_for

import tfdist
from tfdist.optimizers.ownership import balanced_owners

pytestmark = pytest.mark.as_traced


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_owners_are_balanced(sizes, num_ranks):
    owners = balanced_owners(sizes, num_ranks)
    assert len(owners) == len(sizes) and set(owners) <= set(range(num_ranks))
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(num_ranks)]
    assert max(loads) <= sum(sizes) / num_ranks + max(sizes, default=0)
    assert owners == balanced_owners(sizes, num_ranks), "every rank must find the same"


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_each_slot_is_on_one_device(zero_stage):
    strategy = strategy_for(3, zero_stage)
    trained = fit(strategy, mlp, lambda: keras.optimizers.Lamb(0.01))
    report = tfdist.memory_report(trained.model)
    sizes = [4 * int(tf.size(weight)) for weight in trained.model.get_weights()]
    held = [device.optimizer_bytes - 12 for device in report.devices]  # without iteration and learning rate
    assert sum(held) == 2 * sum(sizes)
    assert max(held) <= 2 * (sum(sizes) / 3 + max(sizes))
    for slot in trained.model.optimizer.variables[2:]:
        components = slot.value.values
        assert sorted(component.shape.num_elements() for component in components)[:2] == [0, 0]
        assert slot.shape == slot.numpy().shape


def test_stage_0_has_no_owners():
    report = tfdist.memory_report(fit(strategy_for(2, 0), mlp, lambda: keras.optimizers.Lamb(0.01)).model)
    assert [device.optimizer_bytes for device in report.devices] == [report.mirrored.optimizer_bytes] * 2


def test_what_no_optimizer_makes_has_no_owner():
    strategy = strategy_for(2, 1)
    with strategy.scope():
        weight = tf.Variable(tf.ones((3, 5)))
        with strategy.extended.colocate_vars_with(weight):
            beside = tf.Variable(tf.zeros((3, 5)), trainable=False)
    assert [component.shape.num_elements() for component in beside.values] == [8, 8]


class Counting(keras.optimizers.SGD):
    """Counts updates in a scalar that belongs to no parameter."""

    def build(self, variables):
        super().build(variables)
        self.count = self.add_variable(shape=(), name="count")

    def update_step(self, gradient, variable, learning_rate):
        self.assign_add(self.count, 1.0)
        super().update_step(gradient, variable, learning_rate)


def test_common_state_that_one_rank_would_write_is_refused():
    with pytest.raises(NotImplementedError, match="Counting.update_step.*not a slot"):
        fit(strategy_for(2, 1), mlp, lambda: Counting(0.1))
