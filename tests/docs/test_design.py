"""The pages of docs/design: their pictures are those of traced steps, their path can be read, what they name exists."""

import ast
import re

import pytest
from drawing import script
from test_architecture import ROOT, TREES

PAGES = sorted((ROOT.parent / "docs" / "design").glob("*.md"))


@pytest.fixture(scope="module")
def draw_design():
    return script("draw_design")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_as_they_are_written(draw_design, page):
    """If not: python docs/draw_design.py."""
    text = page.read_text("utf-8")
    assert draw_design.written(text) == text
    assert text.count("\n") <= 200


def test_all_pictures_are_shown(draw_design):
    shown = {found[2] for page in PAGES for found in draw_design.BLOCK.finditer(page.read_text("utf-8"))}
    assert shown == set(draw_design.PICTURES)


def test_the_path_can_be_read_in_an_afternoon(draw_design):
    files = draw_design.path_of((ROOT.parent / "docs" / "design" / "path.md").read_text("utf-8"))
    assert len(files) == len(set(files)) > 30
    assert sum((ROOT / file).read_text("utf-8").count("\n") for file in files) <= 6000
    early = set(files) & set(draw_design.doors_of(files))
    assert not early, f"{early} stand behind files that import them"


def test_doors_are_what_stands_not_before(draw_design):
    assert "sharding/zero.py" in draw_design.doors_of(["sharding/config.py"])
    assert "sharding/zero.py" not in draw_design.doors_of(["sharding/zero.py", "sharding/config.py"])


def classes():
    """Returns the names that each class of tfdist defines, by its name."""
    found = {}
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.ClassDef)}
                names |= {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}
                assigned = [target for one in node.body if isinstance(one, ast.Assign) for target in one.targets]
                names |= {target.id for target in assigned if isinstance(target, ast.Name)}
                inside = [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)]
                found.setdefault(node.name, set()).update(names, (one.attr for one in inside))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page):
    named, known = re.findall(r"`([\w./]+)`", page.read_text("utf-8")), classes()
    for name in named:
        if name.endswith(".py"):
            assert any((root / name).exists() for root in (ROOT, ROOT / "collectives", ROOT.parent)), name
        owner, _, attribute = name.partition(".")
        if owner in known and attribute:
            assert attribute in known[owner], name
    assert named
