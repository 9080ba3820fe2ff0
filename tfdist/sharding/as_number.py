"""What TensorFlow's plain variables are to Python and NumPy, for distributed ones: a number, an array, a condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class AsNumber:
    """Mixed into a distributed variable: `int(v)`, `float(v)`, `np.array(v)`, `if v:` do what they do with one device's variable.

    TensorFlow's distributed variables have none of these. What is read is `numpy()`: the value of all ranks together outside
    replicas, and in a rank that runs eagerly what the rank reads.
    """

    numpy: Callable[[], Any]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.numpy(), dtype)  # a scalar's `numpy()` is a number
        return array.copy() if copy else array

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())
