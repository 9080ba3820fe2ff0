"""The states of Python's and NumPy's global random generators, as what JSON can carry."""

import random
from typing import Any

import numpy as np


def random_states() -> list[Any]:
    """Returns both states."""
    version, numbers, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    return [[version, list(numbers), gauss], [name, np.asarray(keys).tolist(), place, has_gauss, cached]]


def set_random_states(states: list[Any]) -> None:
    """Puts back what `random_states` has returned, in this process or another."""
    (version, numbers, gauss), (name, keys, place, has_gauss, cached) = states
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state((name, np.array(keys, np.uint32), place, has_gauss, cached))
