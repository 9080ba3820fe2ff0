"""A fingerprint changes with a bit of a tensor or the order of its elements, in every dtype."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.sharding.fingerprints import fingerprint


def of(values, dtype):
    return int(fingerprint(tf.constant(values, dtype)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "int64"])
def test_bits_and_order_change_it(dtype):
    one = of([1, 2, 3, 4, 5], dtype)
    assert one == of([1, 2, 3, 4, 5], dtype)
    others = [of(x, dtype) for x in ([1, 2, 3, 4, 6], [2, 1, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3, 4, 5, 0])]
    assert one not in others and len(set(others)) == 4


def test_bits_and_not_values_of_floats_count():
    """Copies of NaN are the same, and a zero with a sign is another one."""
    assert of([np.nan], "float32") == of([np.nan], "float32")
    assert of([0.0], "float32") != of([-0.0], "float32")
    assert of([0.25], "float32") != of([0.5], "float32")


def test_strings_and_flags():
    assert of(["a", "b"], tf.string) == of(["a", "b"], tf.string) != of(["b", "a"], tf.string)
    assert of([True, False], tf.bool) != of([False, True], tf.bool)


def test_nothing_and_zeros_differ():
    assert of([], "float32") == 0 != of([0.0], "float32")
