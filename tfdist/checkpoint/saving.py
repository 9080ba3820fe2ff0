"""Saving a model under a tfdist strategy: all workers read it, and one writes.

All workers call `model.save(path)`, all read the same variables in the same order, and the chief alone writes:

    chief     barrier   read 0, read 1, ..., read n    move the file into place    share the outcome
    reader    barrier   read 0, read 1, ..., read n                                share the outcome

The file changes only between the two, so any worker may load it before and after; loading needs nothing of this. With one worker
they cost nothing. Local files are replaced atomically (`staging`); remote ones (gs://, hf://) are written as Keras writes them.

What the disk refuses is raised on all workers alike, with the previous file still in its place: the chief learns of it when all
is read (`UnfailingFile`), or else reads on as the others do. Any other error of the chief is raised on the chief only, and ends
the job. The mistake to avoid: saving on the chief alone, which waits for the others for ever.

A function here is for a model that a tfdist strategy made; `write(path)` is how Keras writes the file. The walk over a
model and its stores are private to Keras: tests/checkpoint/test_private_names_of_saving.py fails when they change.
"""

import contextlib
import contextvars
import io
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import h5py
from keras.src.saving import saving_lib
from keras.src.utils import file_utils, io_utils

from tfdist import errors, temporary
from tfdist.checkpoint.discarding import DiscardingAssets, DiscardingFile, DiscardingShardedStore, DiscardingStore
from tfdist.checkpoint.staging import staged
from tfdist.checkpoint.unfailing_file import UnfailingFile, UnfailingStore
from tfdist.checkpoint.writing_role import chief_decides, is_chief, tfdist_strategy
from tfdist.sharding.compression import COMPRESSION

# Writes to a path, and returns the files that are to be asked whether all of it was kept.
_Write = Callable[[str], "list[UnfailingFile]"]
# What is added to a file of weights before it is closed.
_addition: contextvars.ContextVar[Callable[[h5py.File], None] | None] = contextvars.ContextVar("addition", default=None)


def save_model(model: Any, filepath: Any, weights_format: str, write: Callable[[Any], None]) -> None:
    """Saves a model as `.keras` file or directory."""
    if weights_format != "h5":
        raise errors.not_implemented('`weights_format` must be "h5" under several workers.', weights_format=weights_format)

    def read() -> None:
        saving_lib._serialize_model_as_json(model)  # a `get_config` may read variables
        with contextlib.closing(DiscardingAssets()) as assets:
            read_state(model, DiscardingStore(), assets)

    def write_to(path: str) -> list[UnfailingFile]:
        if not path.endswith(".keras"):
            write(path)  # a directory
            return []
        with UnfailingFile(path) as file:
            write(file)
        return [file]

    _save(model, filepath, write_to, read, write)


def save_weights(
    model: Any, filepath: Any, max_shard_size: float | None, objects_to_skip: Iterable[Any] | None, write: Callable[[Any], None]
) -> None:
    """Saves a model's weights as `.weights.h5`, or as `.weights.json` with shards."""
    add = _addition.get()

    def read() -> None:
        store = DiscardingStore() if max_shard_size is None else DiscardingShardedStore(filepath, max_shard_size)
        read_state(model, store, skipped=objects_to_skip or ())

    def write_to(path: str) -> list[UnfailingFile]:
        if max_shard_size is not None:
            write(path)
            return []
        with contextlib.closing(UnfailingStore(path, is_sealed=add is not None)) as store:
            read_state(model, store, skipped=objects_to_skip or ())
            if add is not None:
                add(store.h5_file)
        return [store.io_file]

    _save(model, filepath, write_to, read, write, makes_directory=add is not None)


def save_model_to_hdf5(model: Any, filepath: Any, write: Callable[[Any], None]) -> None:
    """Saves a model as `.h5`. A reader holds the optimizer's state for a moment, as the chief does."""

    def write_to(path: str) -> list[UnfailingFile]:
        with UnfailingFile(path) as file, h5py.File(file, "w") as opened:
            write(opened)
        return [file]

    # Keras makes the directory for this format.
    _save(model, filepath, write_to, lambda: write(DiscardingFile(filepath)), write, makes_directory=True)


def save_backup(model: Any, filepath: str, add: Callable[[h5py.File], None]) -> None:
    """Saves a model's weights as `model.save_weights` does, sealed, in a directory that is made if need be; all workers call it.

    On the chief `add`, called with the file when the weights are written, puts into it what else it is to hold.
    """
    with temporary.context_value(_addition, add):
        model.save_weights(filepath, overwrite=True)


def may_write(model: Any, filepath: Any) -> bool:
    """Returns, on all workers, whether a file may be overwritten: the chief asks, for all."""
    strategy = tfdist_strategy(model)
    is_free = not is_chief(strategy) or isinstance(filepath, io.IOBase) or not os.path.exists(filepath)
    return chief_decides(strategy, "overwrite", is_free or io_utils.ask_to_proceed_with_overwrite(str(filepath)))


def _save(
    model: Any,
    filepath: Any,
    write: _Write,
    read: Callable[[], None],
    write_as_keras: Callable[[Any], None],
    makes_directory: bool = False,
) -> None:
    """Writes the file on the chief, by `write(path)`, and only reads on the others; while all are here."""
    strategy = tfdist_strategy(model)
    strategy.barrier("save/begin")
    COMPRESSION.now.complete_copies(model.variables)
    failure = None
    if not is_chief(strategy):
        read()
    elif file_utils.is_remote_path(filepath):
        write_as_keras(filepath)
    else:
        failure = _written(filepath, write, read, makes_directory)
    _raise_on_all(strategy, "save/end", failure)


def write_on_chief(strategy: Any, name: str, write: Callable[[], None]) -> None:
    """Has the chief write files, by `write()`; what the disk refuses is raised on all workers, which call this at once."""
    failure = None
    if is_chief(strategy):
        try:
            write()
        except OSError as error:
            failure = error
    _raise_on_all(strategy, name, failure)


def _raise_on_all(strategy: Any, name: str, failure: OSError | None) -> None:
    """Raises on every worker what the chief has met with, if anything."""
    outcome = strategy.share(name, "" if failure is None else json.dumps([failure.errno, failure.strerror or str(failure)]))
    if outcome:
        raise failure or OSError(*json.loads(outcome))


def _written(filepath: Any, write: _Write, read: Callable[[], None], makes_directory: bool) -> OSError | None:
    """Writes the file, and returns what the disk refused, None where all is well. All variables have been read in any case.

    An error that ends the reading of variables is raised.
    """
    begun = is_read = False
    try:
        with staged(filepath, makes_directory) as path:
            begun = True
            files = write(path)
            is_read = True
            for file in files:
                file.check(filepath)
    except OSError as error:
        if begun and not is_read:
            raise
        if not begun:
            read()
        return error
    return None


def read_state(
    model: Any, store: saving_lib.H5IOStore, assets: DiscardingAssets | None = None, skipped: Iterable[Any] = ()
) -> None:
    """Reads what Keras would save, by Keras's own walk."""
    visited = {id(saveable) for saveable in skipped}
    saving_lib._save_state(model, weights_store=store, assets_store=assets, inner_path="", visited_saveables=visited)
