"""Messages between the ranks of a pipeline in one process: plain point_to_point, whichever rank is traced first."""

import pytest
import tensorflow as tf
from ranks import per_rank, rank_id, strategy_on

from tfdist.collectives import current_program, point_to_point


def run(strategy, function, values):
    return [float(x) for x in tf.function(lambda x: strategy.run(function, args=(x,)))(per_rank(strategy, values)).values]


def test_there_and_back():
    """Rank 0 needs what rank 1, which is traced later, makes of what rank 0 sends."""
    strategy = strategy_on(2, pipeline_parallel_size=2)
    number, rows = tf.TensorSpec([], tf.float32), tf.constant(0)

    def on_rank(x):
        program = current_program()
        if rank_id() == 0:
            point_to_point.send_message(program, x + 1, 1, "there")
            return point_to_point.receive_message(program, number, rows, 1, "back")
        doubled = 2 * point_to_point.receive_message(program, number, rows, 0, "there")
        point_to_point.send_message(program, doubled, 0, "back")
        return doubled + x

    assert run(strategy, on_rank, [3.0, 3.0]) == [8.0, 11.0], "both ranks of the pipeline have the one replica's input"
    assert not any(strategy.last_plan.records), "nothing goes over a wire"


def test_what_nobody_sends():
    strategy = strategy_on(2, pipeline_parallel_size=2)

    def on_rank(x):
        return point_to_point.receive_message(
            current_program(), tf.TensorSpec([], tf.float32), tf.constant(0), 1 - rank_id(), "it"
        )

    with pytest.raises(RuntimeError, match="waits for 'it', which rank 1 never sends"):
        run(strategy, on_rank, [0.0, 0.0])


def test_what_is_not_expected():
    strategy = strategy_on(2, pipeline_parallel_size=2)

    def on_rank(x):
        if rank_id() == 0:
            return point_to_point.receive_message(current_program(), tf.TensorSpec([3], tf.float32), tf.constant(0), 1, "it")[0]
        point_to_point.send_message(current_program(), tf.zeros([4]), 0, "it")
        return x

    with pytest.raises(RuntimeError, match=r"expects 'it' to be float32\(3,\), but rank 1 sends float32\(4,\)"):
        run(strategy, on_rank, [0.0, 0.0])
