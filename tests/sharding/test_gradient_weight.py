"""What a gradient is multiplied by where it is summed: the rows' weight, once, and nothing of a rank without rows."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.sharding.gradient_weight import GradientWeight, weighted, without_weight


def counted(weight, has_numbers=False, enters=False, notes=True):
    """Returns by what whole gradients and those of a tape are multiplied, None for nothing."""
    state = GradientWeight(None)
    if weight is not None:
        state.use(lambda: tf.constant(weight, tf.float64))
    state.has_numbers = has_numbers
    with state.entered_with_the_loss(enters):
        if notes:
            state.note_entered()
        with state.of_gradient():
            return [None if x is None else float(x) for x in (state.of_wholes(), state.of_tape())]


@pytest.mark.parametrize(
    ("weight", "numbers", "enters", "expected"),
    [
        (None, False, False, [None, None]),  # a custom training loop
        (0.25, False, False, [0.25, 1]),
        (0.0, False, False, [0, 0]),
        (0.25, False, True, [None, None]),  # the loss has been weighted
        (0.25, True, True, [1, 1]),
        (0.0, True, True, [0, 0]),
    ],
)
def test_table(weight, numbers, enters, expected):
    assert counted(weight, numbers, enters) == expected


def test_a_gradient_of_what_no_weight_has_entered():
    """Of a penalty that is differentiated within the loss, for instance: it counts the weight as any other."""
    assert counted(0.25, enters=True, notes=False) == [0.25, 1]


def test_what_has_entered_counts_for_one_gradient():
    state = GradientWeight(None)
    with state.entered_with_the_loss():
        state.note_entered()
        with state.of_gradient():
            assert state.is_in_loss and not state.is_nested
            with state.of_gradient():
                assert state.is_nested and not state.is_in_loss
            assert state.is_in_loss and not state.is_nested
        with state.of_gradient():
            assert not state.is_in_loss


def test_a_rank_without_rows_counts_nothing():
    grad = tf.constant([np.nan, np.inf, 3.0])
    assert weighted(grad, tf.constant(0.0, tf.float64)).numpy().tolist() == [0, 0, 0]
    assert without_weight(grad[2:], tf.constant(0.0, tf.float64)).numpy().tolist() == [0]
    assert weighted(grad, None) is grad and without_weight(grad, None) is grad
    assert without_weight(weighted(grad[2:], tf.constant(0.25)), tf.constant(0.25)).numpy().tolist() == [3]
