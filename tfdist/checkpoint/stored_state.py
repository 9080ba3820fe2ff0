"""Named arrays in an HDF5 file of Keras's weights, in a group of their own, which Keras does not look at.

    latest.weights.h5
        layers, optimizer, ...      Keras's
        tfdist/extra                a data set per array, "/" in its name written as "|": its bytes
        tfdist/metrics              the same

The bytes are those of NumPy's array, because HDF5 knows neither bfloat16 nor float8.
"""

from __future__ import annotations

from collections.abc import Mapping

import h5py
import numpy as np

_GROUP = "tfdist"


def put_state(file: h5py.File, name: str, state: Mapping[str, np.ndarray]) -> None:
    """Stores the arrays of `state` under `name`."""
    group = file.create_group(f"{_GROUP}/{name}")
    for key, value in state.items():
        value = np.asarray(value)
        stored = group.create_dataset(key.replace("/", "|"), data=np.frombuffer(value.tobytes(), np.uint8))
        stored.attrs["dtype"], stored.attrs["shape"] = value.dtype.name, value.shape


def take_state(file: h5py.File, name: str) -> dict[str, np.ndarray] | None:
    """Returns the arrays that were stored under `name`; None: nothing was, as in a file of Keras without tfdist."""
    group = file.get(f"{_GROUP}/{name}")
    if group is None:
        return None
    return {
        key.replace("|", "/"): np.frombuffer(stored[()].tobytes(), np.dtype(stored.attrs["dtype"])).reshape(stored.attrs["shape"])
        for key, stored in group.items()
    }
