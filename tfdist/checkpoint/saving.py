"""Saving a model that several workers hold: all read it, and one writes.

Under a strategy over several workers all of them call `model.save(path)`, all read the same variables in the same order, and
the chief alone writes:

    chief     barrier   read 0, read 1, ..., read n    move the file into place    barrier
    reader    barrier   read 0, read 1, ..., read n                                barrier

The file changes only between the barriers, so any worker may load it before and after; loading needs nothing of this. Local
files are replaced atomically (`staging`); remote ones (gs://, hf://) are written as Keras writes them. An error of the chief is
raised on the chief only, and ends the job. The mistake to avoid: saving on the chief alone, which waits for the others for
ever.

A function here is for a model whose `writing_role` is not `ALONE`; `write(path)` is how Keras writes the file. The walk over a
model and its stores are private to Keras: tests/checkpoint/test_private_names_of_saving.py fails when they change.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from typing import Any

from keras.src.saving import saving_lib
from keras.src.utils import file_utils, io_utils

from tfdist import errors
from tfdist.checkpoint.discarding import DiscardingAssets, DiscardingFile, DiscardingShardedStore, DiscardingStore
from tfdist.checkpoint.staging import staged
from tfdist.checkpoint.writing_role import WritingRole, all_workers_inside, chief_decides, cluster_strategy, writing_role


def save_model(model: Any, filepath: Any, weights_format: str, write: Callable[[Any], None]) -> None:
    """Saves a model as `.keras` file or directory."""
    if weights_format != "h5":
        raise errors.not_implemented('`weights_format` must be "h5" under several workers.', weights_format=weights_format)

    def read() -> None:
        saving_lib._serialize_model_as_json(model)  # a `get_config` may read variables
        _read_state(model, DiscardingStore(), DiscardingAssets())

    _save(model, filepath, write, read)


def save_weights(
    model: Any, filepath: Any, max_shard_size: float | None, objects_to_skip: Iterable[Any] | None, write: Callable[[Any], None]
) -> None:
    """Saves a model's weights as `.weights.h5`, or as `.weights.json` with shards."""

    def read() -> None:
        store = DiscardingStore() if max_shard_size is None else DiscardingShardedStore(filepath, max_shard_size)
        _read_state(model, store, None, skipped=objects_to_skip or ())

    _save(model, filepath, write, read)


def save_model_to_hdf5(model: Any, filepath: Any, write: Callable[[Any], None]) -> None:
    """Saves a model as `.h5`. A reader holds the optimizer's state for a moment, as the chief does."""
    if writing_role(model) is WritingRole.CHIEF:
        os.makedirs(os.path.dirname(os.path.abspath(filepath)), exist_ok=True)  # as Keras does for this format
    _save(model, filepath, write, lambda: write(DiscardingFile(filepath)))


def may_write(model: Any, filepath: Any) -> bool:
    """Returns, on all workers, whether a file may be overwritten: the chief asks, for all."""
    strategy = cluster_strategy(model)
    return chief_decides(strategy, "overwrite", strategy.cluster.is_chief and _may_write(filepath))


def _may_write(filepath: Any) -> bool:
    if isinstance(filepath, io.IOBase):
        return True
    return not os.path.exists(filepath) or io_utils.ask_to_proceed_with_overwrite(str(filepath))


def _save(model: Any, filepath: Any, write: Callable[[Any], None], read: Callable[[], None]) -> None:
    """Writes the file on the chief, by `write(path)`, and only reads on the others; while all are here."""
    strategy = cluster_strategy(model)
    with all_workers_inside(strategy, "save"):
        if not strategy.cluster.is_chief:
            read()
        elif file_utils.is_remote_path(filepath):
            write(filepath)
        else:
            with staged(filepath) as path:
                write(path)


def _read_state(model: Any, store: saving_lib.H5IOStore, assets: DiscardingAssets | None, skipped: Iterable[Any] = ()) -> None:
    """Reads what Keras would save, by Keras's own walk."""
    try:
        saving_lib._save_state(
            model,
            weights_store=store,
            assets_store=assets,
            inner_path="",
            visited_saveables={id(saveable) for saveable in skipped},
        )
    finally:
        if assets is not None:
            assets.close()
