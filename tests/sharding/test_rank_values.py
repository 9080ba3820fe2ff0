"""What every rank holds of a variable is read and put back rank by rank; on another number of ranks as one value."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import rank_id, strategy_on, trace

from tfdist.sharding.rank_values import assign_rank_values, holds_summands, rank_values, whole_of


def made(num_ranks, shapes, aggregation):
    strategy = strategy_on(num_ranks)
    with strategy.scope():
        kinds = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": aggregation, "trainable": False}
        return strategy, [tf.Variable(tf.zeros(shape), **kinds) for shape in shapes]


def test_whole_values():
    values = np.array([[1.0, 2.0], [3.0, 1.0], [3.0, 0.5]], "float16")
    assert whole_of(values, are_summands=True).tolist() == [7, 3.5] and whole_of(values, True).dtype == "float16"
    assert whole_of(values, are_summands=False).tolist() == [3, 1], "the copy that is ahead of the others, whole"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_summands_are_read_and_put_back(num_ranks):
    strategy, variables = made(num_ranks, [(5,), (), (1, 3)], tf.VariableAggregation.SUM)

    def on_rank():
        for place, variable in enumerate(variables):
            variable.assign_add(tf.fill(variable.shape, float(10 * place + rank_id() + 1)))

    trace(strategy, on_rank)()
    values = rank_values(variables)
    for place, value in enumerate(values):
        assert value.shape == (num_ranks, *variables[place].shape)
        assert [np.unique(one).tolist() for one in value] == [[10 * place + rank + 1] for rank in range(num_ranks)]
    assert all(map(holds_summands, variables))
    for variable in variables:
        variable.assign(tf.zeros(variable.shape))
    for variable, value in zip(variables, values, strict=True):
        assign_rank_values(variable, value)
    for before, after in zip(values, rank_values(variables), strict=True):
        np.testing.assert_array_equal(after, before)


def test_another_number_of_ranks():
    _, (variable,) = made(3, [(5,)], tf.VariableAggregation.SUM)
    assign_rank_values(variable, np.arange(10.0, dtype="float32").reshape(2, 5))
    assert variable.numpy().tolist() == [5, 7, 9, 11, 13]
