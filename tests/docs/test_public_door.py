"""The pages speak of every setting and of every name that `tfdist.__all__` lists."""

import dataclasses
import pathlib
import re

import pytest

import tfdist

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.name != "reference.md")]


@pytest.mark.parametrize("name", tfdist.__all__)
def test_a_page_speaks_of_it(name):
    assert any(f"tfdist.{name}" in page.read_text("utf-8") for page in PAGES)


@pytest.mark.parametrize("field", dataclasses.fields(tfdist.ShardingConfig), ids=lambda field: field.name)
def test_every_setting_is_in_the_table(field):
    rows = [line.split("|") for line in (ROOT / "docs" / "tuning.md").read_text("utf-8").splitlines()]
    (default,) = [row[2].strip() for row in rows if len(row) > 4 and row[1].strip() == f"`{field.name}`"]
    mebibytes = f"{field.default // 2**20} MiB" if field.name.endswith("_bytes") else ""
    assert re.split("[,:]", default)[0].strip("`") in (str(field.default), mebibytes)
