"""A step that Keras's trainer runs on a rank: what it logs counts the rank's rows, and only there a rank has rows of a step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import run, strategy_on

from tfdist.collectives import current_program
from tfdist.losses.trainer_step import eager_losses, losses_of, of_trainer, trainer_step
from tfdist.placements.rank_rows import RankRows
from tfdist.sharding.gradient_weight import GradientWeight


@pytest.mark.parametrize("sizes", [(5, 2), (7, 0)])
def test_logs_by_the_ranks_weights_make_up_one_devices(sizes):
    """Of means, of sums, and of extremes; of a rank without rows, whose mean is NaN, nothing counts."""
    rows = np.split(np.arange(7, dtype="float32"), [sizes[0]])
    strategy, model = strategy_on(2), keras.Sequential()

    def on_rank(x):
        def step(data):
            assert trainer_step() is not None and current_program("test").part(GradientWeight).is_of_trainer
            return {
                "mean": tf.reduce_mean(data),
                "deep": [tf.reduce_sum(data), tf.reduce_max(data)],
                "has_many": tf.reduce_max(data) > 5,
                "rows": data,
            }

        logs = of_trainer(model, step, is_keras_own=False)(x)
        assert logs["has_many"].dtype == tf.int32
        return [logs["mean"], *logs["deep"], logs["rows"], current_program("test").part(RankRows).weight()]

    *numbers, own, weights = zip(*run(strategy, on_rank, rows), strict=True)
    np.testing.assert_allclose(weights, np.divide(sizes, 7))
    found = [sum(x * weight for x, weight in zip(ranks, weights, strict=True) if weight) for ranks in numbers]
    np.testing.assert_allclose(found, [3, 21, 6], rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate(own), np.arange(7))


def test_a_step_of_keras_own_keeps_its_logs_and_counts_rows_along():
    strategy, model = strategy_on(2), keras.Sequential()

    def on_rank(x):
        rows = current_program("test").part(RankRows)
        loss = of_trainer(model, lambda data: {"loss": tf.reduce_mean(data)}, is_keras_own=True)(x)["loss"]
        assert rows.sends_rows_along and rows.are_means and rows.model is model
        return loss

    assert run(strategy, on_rank, [np.float32([1, 2, 6]), np.float32([4])]) == [3, 4]
    assert strategy.last_plan.counts() == {}


def test_elsewhere_there_is_no_step():
    model = keras.Sequential()

    def on_rank():
        found = [trainer_step() is None]
        with losses_of(model):
            found.append(trainer_step() is current_program("test").part(RankRows))
        return tf.constant([*found, trainer_step() is None, eager_losses(model) is None])

    np.testing.assert_array_equal(run(strategy_on(2), on_rank), [[True] * 4] * 2)
    np.testing.assert_array_equal(run(strategy_on(1), on_rank), [[True, False, True, True]])  # one rank has all rows
    assert trainer_step() is None and eager_losses(model) is None
    assert of_trainer(model, lambda data: data + 1, is_keras_own=False)(1) == 2
