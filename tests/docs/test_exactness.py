"""Every row of docs/exactness.md names tests that exist."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "exactness.md").read_text("utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| what `MirroredStrategy`")]


def named_tests(cell):
    """Yields (file, function) of a cell; a file may be named by its last part, a function without its file follows it."""
    file = None
    for name in re.findall(r"`([^`]+)`", cell):
        place, _, function = name.rpartition("::") if "::" in name else ("", "", name)
        if name.endswith(".py"):
            place, function = name, ""
        if place:
            found = [path for path in (ROOT / "tests").rglob("*.py") if str(path).endswith(f"/{place}")]
            assert len(found) == 1, f"{place} is {found}"
            (file,) = found
        yield file, function.partition("[")[0]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:42])
def test_rows_name_tests(row):
    cells = row.strip("|").split(" | ")
    assert len(cells) == 3, row
    tests = list(named_tests(cells[2]))
    assert tests
    for file, function in tests:
        assert function == "" or f"def {function}(" in file.read_text("utf-8"), f"{file.name} has no {function}"


def test_the_page_has_rows():
    assert len(ROWS) > 25
