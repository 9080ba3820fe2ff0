"""What an update reads and assigns in the place of a parameter: noted, or written at once where it has a handle."""

import pytest
import tensorflow as tf

from tfdist.optimizers.stand_in import StandIn


def stand_ins():
    """Returns one that notes and one that has a handle, with the variables that they stand for."""
    noting, written = tf.Variable([1.0, 2.0, 4.0], name="w"), tf.Variable([1.0, 2.0, 4.0], name="w")
    return [(StandIn(noting, noting.value()), noting), (StandIn(written, written, handle=written.handle), written)]


@pytest.mark.parametrize("has_handle", [False, True])
def test_assignments(has_handle):
    stand_in, variable = stand_ins()[has_handle]
    assert stand_in.assign([2.0, 4.0, 8.0]) is stand_in
    stand_in.assign_add([1.0, 1.0, 1.0])
    stand_in.assign_sub([0.0, 1.0, 2.0])
    assert stand_in.value().numpy().tolist() == [3, 4, 7]
    assert variable.numpy().tolist() == ([3, 4, 7] if has_handle else [1, 2, 4])


@pytest.mark.parametrize("has_handle", [False, True])
def test_another_shape_is_refused(has_handle):
    stand_in, _ = stand_ins()[has_handle]
    for value in ([1.0, 2.0], 1.0):
        with pytest.raises(ValueError, match="must keep the shard's shape"):
            stand_in.assign(value)
    assert stand_in.value().numpy().tolist() == [1, 2, 4]


def test_it_computes_as_its_value():
    stand_in, _ = stand_ins()[0]
    assert (8 / stand_in - stand_in * 2 + (-stand_in) ** 2).numpy().tolist() == [7, 4, 10]
    assert abs(1 - stand_in).numpy().tolist() == [0, 1, 3] and float(stand_in[1]) == 2
    assert (stand_in >= 2).numpy().tolist() == [False, True, True]
    assert float(tf.reduce_sum(stand_in)) == 7 and stand_in.shape == [3] and stand_in.dtype == tf.float32


def test_the_path_is_that_of_keras():
    variable = tf.Variable(1.0, name="w")
    assert StandIn(variable, variable.value(), "dense/kernel").path == "dense/kernel"
    assert StandIn(variable, variable.value()).path == variable.name
    assert StandIn(variable, variable.value())._distributed_container() is variable
