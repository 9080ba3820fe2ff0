"""The text form: parsing, printing, and the marks of error messages."""

import pytest

from tfdist.extensions.pipeline import Action
from tfdist.extensions.pipeline.schedules.grid import format_grid, parse_grid, render_grid

GRID = """\
0F0 0F1    .
  . 1F0 1F10"""


def table_of(text):
    return dict(enumerate(parse_grid(text)))


def test_parse_inverts_format():
    (f0, f1), (g0, g1) = [[Action.parse(word) for word in line.split()] for line in ("0F0 0F1", "1F0 1F10")]
    table = {0: (f0, f1, None), 1: (None, g0, g1)}
    assert format_grid(table) == " 0F0  0F1    .\n   .  1F0 1F10"
    assert {rank: tuple(row) for rank, row in table_of(format_grid(table)).items()} == table


def test_what_is_left_out():
    text = "# a header\n\n0F0   0F1 .\n  # 1F7\n\t. 1F0 1F10  \n"
    assert parse_grid(text) == parse_grid(GRID)
    assert parse_grid("") == parse_grid("# nothing\n") == []


@pytest.mark.parametrize("word", ["-", "..", "0F0,", "rank"])
def test_words_that_are_no_action(word):
    with pytest.raises(ValueError, match="`text` must be a stage"):
        parse_grid(f"0F0 {word}")


def test_render():
    assert render_grid(table_of(GRID)).splitlines() == ["rank 0  0F0  0F1   .", "rank 1   .   1F0  1F10"]
    marked = render_grid(table_of(GRID), [Action.parse("1F0")])
    assert marked.splitlines() == ["rank 0   0F0   0F1    .", "rank 1    .   >1F0<  1F10"]


def test_names_of_ranks_are_aligned():
    lines = render_grid({rank: [Action.parse(f"{rank}F0")] for rank in range(11)}).splitlines()
    assert (lines[0], lines[10]) == ("rank  0  0F0", "rank 10  10F0")


def test_a_long_grid_is_shown_near_the_mark():
    table = {0: [Action.parse(f"0F{microbatch}") for microbatch in range(40)]}
    header, line = render_grid(table, [Action.parse("0F20")]).splitlines()
    assert header == "slots 14 to 26 of 40:"
    assert line.split()[2:] == [f">0F{slot}<" if slot == 20 else f"0F{slot}" for slot in range(14, 27)]
    assert len(render_grid(table).split()) == 2 + 40
    assert render_grid(table, [Action.parse("0F0"), Action.parse("0F39")]).count("0F") == 40


def test_an_empty_table():
    assert format_grid({}) == render_grid({}) == ""
