"""A sum is known by the gradient that it was made of, and by itself; never by an equal tensor."""

import tensorflow as tf

from tfdist.sharding.known_sums import KnownSums


def test_a_sum_is_found_by_the_gradient_and_by_itself():
    known, gradient, part = KnownSums(None), tf.ones(5), tf.ones(3)
    known.note(gradient, part)
    assert known.part_of(gradient) is part and known.part_of(part) is part
    assert known.part_of(tf.ones(5)) is None and known.part_of(tf.ones(3)) is None
    assert not known.is_returned(gradient) and not known.is_returned(part)


def test_what_the_user_was_given():
    """The part itself where it stands for the gradient: the one entry must keep that it was returned."""
    known, part = KnownSums(None), tf.ones(3)
    known.note(part, part, is_returned=True)
    assert known.is_returned(part) and known.part_of(part) is part
    assert not known.is_returned(tf.ones(3))


def test_own_summands_take_the_place_of_sums():
    known, gradient, summand, other = KnownSums(None), tf.ones(5), tf.zeros(5), tf.ones(5)
    known.note(gradient, tf.ones(3), summand)
    found = known.own({"sum": gradient, "other": [other]})
    assert found["sum"] is summand and found["other"][0] is other


def test_a_gradient_that_is_dropped_keeps_its_number():
    """Another object that were given its id would be taken for the sum."""
    known = KnownSums(None)
    for number in range(50):
        known.note(tf.fill([5], float(number)), tf.ones(3))
    assert all(known.part_of(tf.ones(5)) is None for _ in range(200))
