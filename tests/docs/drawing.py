"""The scripts that draw pictures of the pages, as modules."""

import importlib.util
import pathlib
import sys

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def script(name):
    """Returns the script of docs/ of this name, imported."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module
