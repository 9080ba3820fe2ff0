"""The file of a backup: Keras's weights, and beside them what else a run goes on from.

    latest.weights.h5
        seal                                    the checksum of all that follows
        layers, optimizer, ...                  Keras's
        tfdist/extra, metrics, callbacks        arrays that Keras does not save: of each, named "/" as "|", its bytes
        tfdist/fit                              the state of `fit`: epoch, batch, place in the data, ..., as JSON

Note: one file. Keras writes the weights, then the epoch into another file; killed in between, a run starts again with weights
that are an epoch ahead. Here all is in one file, which takes its place when it is whole. Keras without tfdist reads its own
metadata and ignores the rest, so it still has that window.
"""

import json
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
from keras.src.utils import file_utils

from tfdist.checkpoint import seal
from tfdist.checkpoint.saving import save_backup
from tfdist.checkpoint.unsaved import tell_what_is_not_saved

_GROUP, _FIT = "tfdist", "fit"

State = Mapping[str, np.ndarray]


def write(path: str, model: Any, state: Mapping[str, Any], arrays: Mapping[str, State]) -> None:
    """Writes the weights of `model` with `state`, which JSON can carry, and groups of `arrays`; the file is replaced at once.

    Numbers of NumPy and TensorFlow in `state` become Python's. All workers call it; the chief writes. In a remote folder the
    weights are written alone, as Keras writes them.
    """

    def add(file: h5py.File) -> None:
        put_state(file, _FIT, {"json": np.frombuffer(json.dumps(state, default=_plain).encode(), np.uint8)})
        for name, group in arrays.items():
            put_state(file, name, group)

    tell_what_is_not_saved(model)
    save_backup(model, path, add)


def _plain(value: Any) -> Any:
    """Returns what stands for `value`, which JSON does not know, in logs of the user's own: a number if it is one."""
    if hasattr(value, "tolist"):
        return value.tolist()
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def read(path: str) -> tuple[dict[str, Any] | None, str]:
    """Returns the state of `fit` in a file, and why no run can go on from the file: "" if one can.

    The state is None where there is none: of a file of Keras without tfdist, a remote one, which is not looked at, and no file.
    """
    if file_utils.is_remote_path(path) or not file_utils.exists(path):
        return None, ""
    if why := seal.damage(path):
        return None, why
    try:
        with h5py.File(path, "r") as file:
            stored = take_state(file, _FIT)
            return json.loads(stored["json"].tobytes()) if stored else None, ""
    except Exception as error:  # a file that has lost its seal, too
        return None, f"{type(error).__name__}: {error}"


def read_arrays(path: str, name: str) -> dict[str, np.ndarray]:
    """Returns the group of arrays `name` of a file, an empty one where there is none."""
    if file_utils.is_remote_path(path):
        return {}
    with h5py.File(path, "r") as file:
        return take_state(file, name)


def put_state(file: h5py.File, name: str, state: State) -> None:
    """Stores the arrays of `state` under `name`: the bytes of NumPy's, because HDF5 knows neither bfloat16 nor float8."""
    group = file.create_group(f"{_GROUP}/{name}")
    for key, value in state.items():
        value = np.asarray(value)
        stored = group.create_dataset(key.replace("/", "|"), data=np.frombuffer(value.tobytes(), np.uint8))
        stored.attrs["dtype"], stored.attrs["shape"] = value.dtype.name, value.shape


def take_state(file: h5py.File, name: str) -> dict[str, np.ndarray]:
    """Returns the arrays that were stored under `name`; none where nothing was, as in a file of Keras without tfdist."""
    return {
        key.replace("|", "/"): np.frombuffer(stored[()].tobytes(), np.dtype(stored.attrs["dtype"])).reshape(stored.attrs["shape"])
        for key, stored in file.get(f"{_GROUP}/{name}", {}).items()
    }
