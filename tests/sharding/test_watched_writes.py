"""Every assignment to a watched variable, and no read, goes by way of the function that watches it."""

import tensorflow as tf

from tfdist.sharding.watched_writes import watch_writes


def watched(calls):
    variable = tf.Variable([1.0, 2.0, 3.0])

    def around(one, write):
        assert one is variable
        calls.append(one.numpy().tolist())
        return write()

    watch_writes(variable, around)
    return variable


def test_assignments_are_seen_before_they_are_made():
    calls = []
    variable = watched(calls)
    variable.assign([4.0, 5.0, 6.0])
    variable.assign_add([1.0, 1.0, 1.0])
    variable.assign_sub([2.0, 2.0, 2.0])
    variable.scatter_nd_update([[1]], [9.0])
    variable[2].assign(7.0)
    assert variable.numpy().tolist() == [3, 9, 7]
    assert calls == [[1, 2, 3], [4, 5, 6], [5, 6, 7], [3, 4, 5], [3, 9, 5]]


def test_reads_and_other_variables_are_not_seen():
    calls = []
    variable, other = watched(calls), tf.Variable([1.0])
    other.assign([2.0])
    assert float(tf.reduce_sum(variable.read_value() + variable[0])) == 9
    assert not calls and type(variable).__name__ == type(other).__name__ and isinstance(variable, type(other))


def test_a_write_may_be_withheld():
    variable = tf.Variable(1.0)
    watch_writes(variable, lambda one, write: None)
    assert variable.assign(2.0) is None and float(variable) == 1
