"""Grids of cases, of which `make test` runs some."""

from typing import Any

import pytest


def exhaustive(*case: Any) -> Any:
    """A case of a grid that only `make test-exhaustive` runs: each of its values stands in another case, too."""
    return pytest.param(*case, marks=pytest.mark.exhaustive)
