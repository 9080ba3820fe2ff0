"""docs/keras_changes.md is what docs/make_keras_changes.py makes of the table, and complete."""

import importlib.util
import pathlib

from tfdist.keras_hooks import TABLE

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_keras_changes", DOCS / "make_keras_changes.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    page = (DOCS / "keras_changes.md").read_text("utf-8")
    assert page == program.page(), "run `python docs/make_keras_changes.py`"
    for row in TABLE.rows:
        assert f"{row.name}{row.signatures[0] if row.signatures else ''}`" in page and row.why in page
    assert page.count("\n## ") == len({row.binding.__module__ for row in TABLE.rows})
