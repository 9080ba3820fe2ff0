"""Of the three states of a gradient two are of the sum over the data ranks."""

from tfdist.sharding.gradient_state import GradientState


def test_what_is_of_the_sum():
    assert {state.name for state in GradientState if state.is_reduced} == {"SHARD", "WHOLE"}
    assert not GradientState.SUMMAND.is_reduced
