"""Actions and their text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.extensions.pipeline import Action, Phase


@given(st.integers(0, 10**4), st.sampled_from(Phase), st.integers(0, 10**4))
def test_parse_inverts_str(stage_index, phase, microbatch):
    action = Action(stage_index, phase, microbatch)
    assert Action.parse(str(action)) == action


def test_the_text():
    assert [str(Action(2, phase, 0)) for phase in Phase] == ["2F0", "2B0", "2I0", "2W0"]
    assert Action.parse("12W34") == Action(12, Phase.BACKWARD_WEIGHT, 34)


def test_texts_that_are_no_action():
    for text in ("", ".", "F0", "2F", "2X0", "2f0", "-1F0", "2F-1", "2F0 ", "2F0,", "2FB0", "²F0"):
        with pytest.raises(ValueError, match="`text` must be a stage, one of the letters F, B, I and W, and a microb") as error:
            Action.parse(text)
        assert f"Received: text={text!r}" in str(error.value)
        assert 'For instance "2F0": stage 2, forward, microbatch 0.' in str(error.value)


@pytest.mark.parametrize(
    ("fields", "name"),
    [((-1, Phase.FORWARD, 0), "stage_index"), ((0, Phase.FORWARD, 1.0), "microbatch"), ((True, Phase.FORWARD, 0), "stage_index")],
)
def test_fields_are_checked(fields, name):
    with pytest.raises(ValueError, match=f"`{name}` must be an integer of at least 0"):
        Action(*fields)


def test_a_phase_is_not_its_letter():
    with pytest.raises(ValueError, match="`phase` must be a `Phase`. Received: phase='F'"):
        Action(0, "F", 0)
