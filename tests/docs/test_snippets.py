"""Every Python block of the documentation runs, on logical CPUs, and prints what the text says it prints."""

import os
import pathlib
import pydoc
import runpy

import pytest
from snippets import anchors, blocks, dotted_names, expected_outputs, file_names, links, printed, script

from tests import forks

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [page for page in PAGES if any(block.language == "python" for block in blocks(page.read_text("utf-8")))]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_blocks_run(page, tmp_path):
    """The blocks of one page share a namespace, in order, in a process of their own: it splits the CPU its own way."""
    text = page.read_text("utf-8")
    program = tmp_path / f"{page.stem}.py"
    program.write_text(script(text), "utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    files = {"output": tmp_path / "output.txt", "errors": tmp_path / "errors.txt"}
    process = forks.start(runpy.run_path, str(program), None, "__main__", environment=environment, folder=tmp_path, **files)
    try:
        assert process.wait(120) == 0, "\n".join(path.read_text("utf-8") for path in files.values())
    finally:
        process.kill()
    output = files["output"].read_text("utf-8")
    for line, mark, expected in expected_outputs(text):
        assert printed(output, mark) == expected, f"{page.name}, line {line}"


def test_the_pages_with_code():
    """So that a page whose blocks are no longer found does not pass in silence."""
    pages = "choosing collectives compression concepts first_run gpus how_it_works multi_worker gpus pipeline planning saving"
    assert [page.stem for page in WITH_CODE] == ["README", *pages.split(), "tensor_parallel", "training", "tuning"]


def test_few_blocks_are_not_run():
    found = [block for page in PAGES for block in blocks(page.read_text("utf-8")) if block.language == "python"]
    assert len([block for block in found if block.not_run]) <= 3
    assert len(found) >= 15


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for target, anchor in links(page.read_text("utf-8"), page):
        assert target.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(target.read_text("utf-8")), f"{page.name}: {target.name} has no #{anchor}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_names_exist(page):
    for name in sorted(dotted_names(page.read_text("utf-8"))):
        assert pydoc.locate(name) is not None, f"{page.name} speaks of {name}"
    for name in sorted(file_names(page.read_text("utf-8"))):
        assert (ROOT / name).exists(), f"{page.name} speaks of {name}"


def test_readme_lists_every_page_and_is_short():
    text = (ROOT / "README.md").read_text("utf-8")
    linked = {target.resolve() for target, _ in links(text, ROOT / "README.md")}
    assert set((ROOT / "docs").glob("*.md")) <= linked
    assert len(text.splitlines()) <= 150


PAGE = """\
Text.

```python
x = 1
print(x)
```

```output
1
```

<!-- not run: no such thing here -->
```python
raise SystemExit
```

```text
not code
```
"""


def test_the_script_keeps_the_lines_of_the_page():
    lines = script(PAGE).splitlines()
    assert lines[3:5] == ["x = 1", "print(x)"]
    assert lines[5].startswith("print(") and not any(lines[6:])
    assert [block.not_run for block in blocks(PAGE)] == [None, None, "no such thing here", None]


def test_outputs_belong_to_the_block_before():
    ((line, mark, expected),) = expected_outputs(PAGE)
    assert (line, expected) == (8, "1")
    assert printed(f"0\n{mark.replace('3', '1')}\n1\n{mark}\n2\n", mark) == "1"
    with pytest.raises(ValueError, match="line 1 follows no Python block"):
        expected_outputs("```output\n1\n```\n")


def test_anchors_and_names():
    text = "# What `x` is\n```sh\n# no heading\n```\n[x](#what-x-is) tfdist.pipeline.draw, tfdist/a.py, tfdist[test], tfdist.a.py"
    assert anchors(text) == {"what-x-is"}
    assert links(text, ROOT / "README.md") == [(ROOT / "README.md", "what-x-is")]
    assert dotted_names(text) == {"tfdist.pipeline.draw"}
    assert file_names(text) == {"tfdist/a.py"}


def test_an_open_block_is_an_error():
    with pytest.raises(ValueError, match="line 2 is not closed"):
        blocks("a\n```python\nx\n")
