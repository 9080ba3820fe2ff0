"""What the package says of itself stands in one place each: its version, the Python versions it is for, its checks."""

import ast
import pathlib
import re
import tomllib

import tfdist

ROOT = pathlib.Path(__file__).parents[1]


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def pythons():
    (listed,) = [
        node.value
        for node in ast.parse(read("setup.py")).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "PYTHONS"
    ]
    return ast.literal_eval(listed)


def test_the_version_stands_once():
    lines = [line for path in ("setup.py", "pyproject.toml", "tfdist/__init__.py") for line in read(path).splitlines()]
    assert [line for line in lines if tfdist.__version__ in line] == [f'__version__ = "{tfdist.__version__}"']
    assert "version=VERSION" in read("setup.py")


def test_the_workflow_runs_what_is_claimed():
    workflow = read(".github/workflows/ci.yml")
    (matrix,) = re.findall(r"^\s+python-version: (\[.*\])", workflow, re.MULTILINE)
    assert ast.literal_eval(matrix) == pythons()
    assert "run: .ci/run" in workflow
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_tools_check_for_the_oldest_python():
    target = tomllib.loads(read("pyproject.toml"))["tool"]["ruff"]["target-version"]
    assert target == f"py{pythons()[0].replace('.', '')}"
    assert f"Python {pythons()[0]} or later" in read("Makefile")


def test_lint_stands_once():
    (recipe,) = re.findall(r"^lint: .*\n((?:\t.*\n)+)", read("Makefile"), re.MULTILINE)
    assert [line.strip() for line in recipe.splitlines()] == ["$(BIN)/ruff check", "$(BIN)/ruff format --check", "$(BIN)/mypy"]
    assert re.findall(r"entry: (.*)", read(".pre-commit-config.yaml")) == ["make lint"]
    assert read(".ci/run").splitlines()[-1] == "make test"
    assert re.search(r"^test: lint$", read("Makefile"), re.MULTILINE)
