"""Which tests run with TensorFlow's graph optimizer, by what becomes of operations that it folds."""

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests import workers

FOLDED = ("Mul", "Sub")


def operations_that_run():
    """Returns which of two operations on constants are left in the graph that runs."""

    @tf.function
    def program(x):
        two = tf.constant([2.0, 3.0])
        return x + (two * two - two)

    context.enable_run_metadata()
    program(tf.constant([1.0, 2.0]))
    graphs = context.export_run_metadata().function_graphs
    context.disable_run_metadata()
    found = {node.op for graph in graphs for node in graph.post_optimization_graph.node}
    assert {"AddV2"} <= found
    return [name for name in FOLDED if name in found]


def test_users_graphs_are_optimized():
    assert operations_that_run() == []


@pytest.mark.as_traced
@pytest.mark.parametrize(("devices", "left"), [(1, FOLDED), (2, ()), (3, FOLDED), (2, ())])
def test_the_mark_and_the_cases_that_keep_the_optimizer(devices, left):
    assert operations_that_run() == list(left)


@pytest.mark.as_traced
def test_workers_do_as_the_test(tmp_path):
    with workers.job(tmp_path, 1, "tests.test_graph_optimizer:operations_that_run") as job:
        assert job.results(100) == [list(FOLDED)]


def test_workers_of_other_tests(tmp_path):
    with workers.job(tmp_path, 1, "tests.test_graph_optimizer:operations_that_run") as job:
        assert job.results(100) == [[]]
