"""Python functions as operations."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives.python_calls import call_python
from tfdist.collectives.shared_memory import aligned_empty


def traced(function, *specs):
    return tf.function(function, autograph=False).get_concrete_function(*specs)


SPEC = tf.TensorSpec([None, 2], tf.float32)


@pytest.mark.parametrize("eagerly", [False, True], ids=["traced", "eagerly"])
def test_arrays_go_in_and_come_out(eagerly):
    seen = []

    def swap(x, y):
        seen.append((type(x), x.dtype, y.shape))
        return [y, x + 1]

    def call(x):
        return call_python(swap, [x, tf.constant([7, 8], tf.int64)], [tf.int64, tf.float32])

    run = call if eagerly else traced(call, SPEC)
    for rows in (3, 1):
        x = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
        y, z = run(tf.constant(x))
        np.testing.assert_array_equal(y, [7, 8])
        np.testing.assert_array_equal(z, x + 1)
    assert seen == [(np.ndarray, np.float32, (2,))] * 2


def test_what_is_aligned_is_not_copied():
    found = aligned_empty((1000, 2), np.float32)
    found[:] = 3
    run = traced(lambda x: call_python(lambda x: [found], [x], [tf.float32]), SPEC)
    [result] = run(tf.ones([1, 2]))
    found[0] = 4
    np.testing.assert_array_equal(result.numpy()[:2], [[4, 4], [3, 3]])


def test_each_function_is_one_of_its_own_and_calls_are_not_merged():
    calls = []

    def function(number):
        def call(x):
            calls.append(number)
            return [x * number]

        return call

    def run(x):
        return [call_python(function(number), [x], [tf.float32])[0] for number in (1, 2, 2)]

    results = traced(run, SPEC)(tf.ones([1, 2]))
    assert [float(x[0, 0]) for x in results] == [1, 2, 2] and sorted(calls) == [1, 2, 2]


def test_an_error_is_raised_with_its_text():
    def call(x):
        raise ValueError("something about x")

    run = traced(lambda x: call_python(call, [x], [tf.float32]), SPEC)
    with pytest.raises(tf.errors.OpError, match="something about x"):
        run(tf.ones([1, 2]))
