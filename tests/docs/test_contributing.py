"""CONTRIBUTING.md has the levels that the architecture's test enforces."""

import pathlib
import re

from test_architecture import LEVELS

ROOT = pathlib.Path(__file__).parents[2]


def test_the_table_of_levels():
    rows = re.findall(r"^\| ([\d.]+) \| (.+?) \|", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    found = {name: float(level) for level, names in rows for name in re.findall(r"`([\w.]+)`", names)}
    assert found == LEVELS
