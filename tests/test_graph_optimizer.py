"""Which tests run with TensorFlow's graph optimizer, by what becomes of operations that it folds."""

import pytest
import tensorflow as tf

from tests import graph_optimizer, workers

FOLDED = ("Mul", "Sub")


def operations_that_run():
    """Returns which of two operations on constants are left in the graph that runs."""

    @tf.function
    def program(x):
        two = tf.constant([2.0, 3.0])
        return x + (two * two - two)

    found = {node.op for node in graph_optimizer.nodes_that_run(program, tf.constant([1.0, 2.0]))}
    assert {"AddV2"} <= found
    return [name for name in FOLDED if name in found]


def test_users_graphs_are_optimized():
    assert operations_that_run() == []


@pytest.mark.as_traced
@pytest.mark.parametrize(("devices", "left"), [(2, FOLDED), (3, ()), (4, FOLDED), (3, ())])
def test_the_mark_and_the_cases_that_keep_the_optimizer(devices, left):
    assert operations_that_run() == list(left)


@pytest.mark.as_traced
def test_workers_do_as_the_test(tmp_path):
    with workers.job(tmp_path, 1, "tests.test_graph_optimizer:operations_that_run") as job:
        assert job.results(100) == [list(FOLDED)]


def test_workers_of_other_tests(tmp_path):
    with workers.job(tmp_path, 1, "tests.test_graph_optimizer:operations_that_run") as job:
        assert job.results(100) == [[]]
