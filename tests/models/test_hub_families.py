"""KerasHub's models in every way of training, beside one device: losses, weights, slots and predictions."""

import pathlib

import pytest

from tests.models.families import FAMILIES
from tests.models.ways import WAYS, on_one_device, on_several
from tests.parity.comparison import assert_same_tree

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "exactness.md"

# Those that every run of the suite trains; it recomputes in tests/programs/memory/test_recomputation.py.
DEFAULT = {
    ("GPT-2", "pipeline 2"),
}
# What does not work: the words of the error.
REFUSED: dict[tuple[str, str], str] = {}

COLUMNS = {
    "stages 0 to 3": ("stage 0", "stage 1", "stage 2", "stage 3"),
    "tensor 2, by `suggest_plan`": ("tensor 2", "tensor 2, stage 3"),
    "LoRA, stage 3": ("LoRA",),
    "LoRA, tensor 2": ("LoRA, tensor 2",),
    "pipeline 2": tuple(way for way in WAYS if way.startswith("pipeline")),
    "recompute": tuple(way for way in WAYS if way.startswith("recompute")),
}

# With TensorFlow's graph optimizer: see tests/graph_optimizer.py.
OPTIMIZED = {("GPT-2", "recompute, stage 3"), ("Gemma", "stage 3")}


def _cases():
    for family in FAMILIES:
        for way in WAYS:
            case = (family, way)
            marks = [] if case in DEFAULT else [pytest.mark.exhaustive]
            yield pytest.param(*case, marks=marks if case in OPTIMIZED else [*marks, pytest.mark.as_traced])


@pytest.mark.parametrize(("family", "way"), list(_cases()))
def test_it_is_one_device(family, way):
    if (family, way) in REFUSED:
        with pytest.raises(Exception, match=REFUSED[family, way]):
            on_several(family, WAYS[way])
        return
    found = on_several(family, WAYS[way])
    assert_same_tree(found, on_one_device(family, WAYS[way].of_one_device), f"{family}, {way}")


def test_the_page_says_what_was_trained():
    lines = [line.strip("|").split("|") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("|")]
    start = next(number for number, cells in enumerate(lines) if cells[0] == "family")
    assert lines[start] == ["family", *COLUMNS]
    assert {way for ways in COLUMNS.values() for way in ways} == set(WAYS)
    rows = {family: cells for family, *cells in lines[start + 2 : start + 2 + len(FAMILIES)]}
    assert rows == {
        family: ["no" if any((family, way) in REFUSED for way in ways) else "exact" for ways in COLUMNS.values()]
        for family in FAMILIES
    }
