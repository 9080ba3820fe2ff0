"""Stores into which a worker that is not the chief saves a model: the stores of Keras, without the files.

Everything but the file is Keras's own code, so such a worker reads a variable when, and only when, the chief reads it. Each value
is dropped as soon as it is read. The names of the stores are private to Keras (`keras.src.saving.saving_lib`):
tests/checkpoint/test_private_names_of_saving.py fails when they change.
"""

import pathlib
import shutil
import tempfile
from typing import Any

import h5py
from keras.src.saving import saving_lib

from tfdist import errors


class DiscardingGroup(dict[str, None]):
    """A group of an HDF5 file that keeps the keys and drops the values."""

    name = "/"  # in a `DiscardingFile` too, where h5py has a property

    def __init__(self, name: str = "/"):
        super().__init__()
        self.name = name

    @property
    def attrs(self) -> dict[str, Any]:
        return {}

    def create_group(self, name: str) -> "DiscardingGroup":
        return DiscardingGroup(f"{self.name.rstrip('/')}/{name}")

    def create_dataset(self, name: str, *args: Any, **kwargs: Any) -> "DiscardingGroup":
        self[name] = None
        return DiscardingGroup()

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, str):  # otherwise a data set is filled: `dataset[:] = value`
            super().__setitem__(key, None)

    def __bool__(self) -> bool:
        return True

    def get(self, name: str, *args: Any, **kwargs: Any) -> Any:
        raise errors.not_implemented(
            "`save_own_variables` must not read back what it stored: on all workers but the chief nothing is kept.",
            key=name,
            fix="Keep the value in a local variable.",
        )

    __getitem__ = get


class DiscardingFile(DiscardingGroup, h5py.File):
    """No file at all, and an HDF5 file that is open for writing to whoever looks at the class."""

    filename = ""  # no property, as it is in h5py

    def __init__(self, filename: Any = ""):
        DiscardingGroup.__init__(self)  # not h5py's, which opens a file
        self.filename = str(filename)

    def flush(self) -> None:
        pass

    close = flush

    def __repr__(self) -> str:
        return f"<DiscardingFile {self.filename!r}>"


class DiscardingStore(saving_lib.H5IOStore):
    """Takes the variables that a worker reads while the chief saves them, and drops them."""

    def __init__(self) -> None:
        super().__init__("discarded", mode="w")

    def _get_h5_file(self, path_or_io: Any, mode: str | None = None) -> DiscardingFile:
        return DiscardingFile(path_or_io)


class DiscardingShardedStore(saving_lib.ShardedH5IOStore):
    """Does the same for weights in several files. It refuses a variable larger than a file may be, as Keras does on the chief."""

    def __init__(self, path: str | pathlib.Path, max_shard_size: float):
        super().__init__(path, max_shard_size, mode="w")

    _get_h5_file = DiscardingStore._get_h5_file

    def close(self) -> None:
        self.h5_file = None  # Keras's own `close` also writes the index


class DiscardingAssets(saving_lib.DiskIOStore):
    """Gives a layer's `save_assets`, which may read variables and so must run, a temporary directory.

    The directory is removed when the next layer is given one, or at the end.
    """

    def __init__(self) -> None:
        self._directory: str | None = None  # not Keras's `__init__`, which makes a directory before any is needed

    def make(self, path: str) -> str:
        self.close()
        self._directory = tempfile.mkdtemp(prefix="tfdist-discarded-")
        return self._directory

    def close(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory)
            self._directory = None
