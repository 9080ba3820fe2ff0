"""docs/reference.md is what docs/make_reference.py makes of the docstrings, and complete."""

import enum
import importlib.util
import inspect
import pathlib
import re

import pytest

import tfdist

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def make_reference():
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(make_reference):
    page = (DOCS / "reference.md").read_text("utf-8")
    assert page == make_reference.reference(), "run `python docs/make_reference.py`"


def test_everything_public_is_in_it(make_reference):
    page = make_reference.reference()
    for name in tfdist.__all__:
        assert f"## tfdist.{name}\n" in page if inspect.ismodule(getattr(tfdist, name)) else f"### `tfdist.{name}`\n" in page
    for module in (getattr(tfdist, name) for name in tfdist.__all__ if inspect.ismodule(getattr(tfdist, name))):
        own = module.__name__.removeprefix("tfdist.")
        for name in module.__all__:
            is_shown = name not in tfdist.__all__ and not inspect.ismodule(getattr(module, name))
            assert not is_shown or f"### `tfdist.{own}.{name}`\n" in page
    assert "0x" not in page  # an address would differ from run to run


def test_what_pages_use_is_in_it():
    """Such as `collectives.all_reduce`: a page that uses another name of these modules has found what programs call."""
    for page in DOCS.glob("*.md"):
        for module, name in re.findall(r"\b(collectives|optimizers)\.(\w+)", page.read_text("utf-8")):
            is_kerass = module == "optimizers" and not hasattr(tfdist.optimizers, name)
            is_file = name in ("md", "py") or inspect.ismodule(getattr(getattr(tfdist, module), name, None))
            assert is_kerass or is_file or name in getattr(tfdist, module).__all__, f"{page.name}: {module}.{name}"


def example(first, second: "int | None" = None, *, third: "str" = "x") -> "list[int]":
    """Does nothing.

        a picture

    Args:
        first, second: two
            lines.
        third: see `https://x`: nothing.

    Returns:
        The first.

    Source: nowhere.

    More.
    """


def test_signatures_of_classes(make_reference):
    """Of `__init__`, whatever an inherited `__new__` takes; without either, as Python has it."""

    class Base:
        def __new__(cls, *args, **kwargs):
            return super().__new__(cls)

    class Own(Base):
        def __init__(self, first, second=2):
            pass

    class Inherited(Own):
        pass

    class Neither:
        pass

    found = [make_reference.signature(made) for made in (Own, Inherited, Base, Neither)]
    assert found == ["(first, second=2)", "(first, second=2)", "(*args, **kwargs)", "()"]


def test_an_enum_has_no_signature(make_reference):
    """Python prints another one in each version."""
    phases = enum.Enum("Phase", "FORWARD BACKWARD")
    assert "```text" not in make_reference.describe("tfdist.Phase", phases, 3)


def test_signatures_and_sections(make_reference):
    assert make_reference.signature(example) == "(first, second: int | None = None, *, third: str = 'x') -> list[int]"
    assert make_reference.signature(example, width=20).splitlines() == [
        "(",
        "    first,",
        "    second: int | None = None,",
        "    *,",
        "    third: str = 'x',",
        ") -> list[int]",
    ]
    assert make_reference.markdown(inspect.getdoc(example)) == [
        "Does nothing.",
        "",
        "    a picture",
        "",
        "**Args**",
        "",
        "- `first`, `second`: two",
        "  lines.",
        "- `third`: see `https://x`: nothing.",
        "",
        "**Returns**",
        "The first.",
        "",
        "**Source** nowhere.",
        "",
        "More.",
        "",
    ]
