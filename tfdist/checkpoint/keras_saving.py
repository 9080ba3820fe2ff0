"""Where Keras saves a model, and every worker would write the same file: the functions that tfdist overrides.

Under a strategy over several workers all of them call `model.save(path)`, all read the same variables in the same order, and
the chief alone writes:

    chief     barrier   read 0, read 1, ..., read n    move the file into place    barrier
    reader    barrier   read 0, read 1, ..., read n                                barrier

The file changes only between the barriers, so any worker may load it before and after; loading needs nothing of this. Local
files are replaced atomically (`staging`); remote ones (gs://, hf://) are written as Keras writes them. An error of the chief is
raised on the chief only, and ends the job. The mistake to avoid: saving on the chief alone, which waits for the others for
ever.

Every override looks at the model's strategy first and falls through, untouched, for all but tfdist's over several workers.
The names are private to Keras: tests/checkpoint/test_private_names_of_saving.py fails when they change.

    saving_lib.save_model, save_weights_only   `.keras` files and directories, `.weights.h5`, `.weights.json`. `Model.save`,
                                               `Model.save_weights` and `keras.saving` look them up in their module
    legacy_h5_format.save_model_to_hdf5        `.h5`. A reader holds the optimizer's state for a moment, as the chief does
    save_model, save_weights                   ask before overwriting: the chief asks, for all
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_api, saving_lib
from keras.src.utils import file_utils, io_utils

from tfdist import errors
from tfdist.checkpoint.discarding import DiscardingAssets, DiscardingFile, DiscardingShardedStore, DiscardingStore
from tfdist.checkpoint.staging import staged
from tfdist.checkpoint.writing_role import WritingRole, all_workers_inside, chief_decides, cluster_strategy, writing_role
from tfdist.override import override


@override("save_model", saving_lib)
def _save_model(
    original: Callable[..., None], model: Any, filepath: Any, weights_format: str = "h5", zipped: bool = True
) -> None:
    path = str(filepath)
    refused = zipped != path.endswith(".keras") or (zipped and path.startswith("hf://"))
    # An object in memory is no file: each worker fills its own. What Keras refuses, it refuses on every worker.
    if writing_role(model) is WritingRole.ALONE or isinstance(filepath, io.IOBase) or refused:
        original(model, filepath, weights_format, zipped)
        return
    if weights_format != "h5":
        raise NotImplementedError(
            errors.message('`weights_format` must be "h5" under several workers.', weights_format=weights_format)
        )

    def read() -> None:
        saving_lib._serialize_model_as_json(model)  # a `get_config` may read variables
        _read_state(model, DiscardingStore(), DiscardingAssets())

    _save(model, filepath, lambda target: original(model, target, weights_format, zipped), read)


@override("save_weights_only", saving_lib)
def _save_weights_only(
    original: Callable[..., None],
    model: Any,
    filepath: Any,
    max_shard_size: float | None = None,
    objects_to_skip: Iterable[Any] | None = None,
) -> None:
    suffixes = (".weights.h5",) if max_shard_size is None else ("weights.h5", "weights.json")
    refused = not model.built or not str(filepath).endswith(suffixes)
    if writing_role(model) is WritingRole.ALONE or refused:
        original(model, filepath, max_shard_size, objects_to_skip)
        return

    def read() -> None:
        store = DiscardingStore() if max_shard_size is None else DiscardingShardedStore(filepath, max_shard_size)
        _read_state(model, store, None, skipped=objects_to_skip or ())

    _save(model, filepath, lambda target: original(model, target, max_shard_size, objects_to_skip), read)


@override("save_model_to_hdf5", legacy_h5_format)
def _save_model_to_hdf5(
    original: Callable[..., None], model: Any, filepath: Any, overwrite: bool = True, include_optimizer: bool = True
) -> None:
    role = writing_role(model)
    if role is WritingRole.ALONE:
        original(model, filepath, overwrite, include_optimizer)
        return
    if role is WritingRole.CHIEF:
        os.makedirs(os.path.dirname(os.path.abspath(filepath)), exist_ok=True)  # as Keras does for this format

    def read() -> None:
        original(model, DiscardingFile(filepath), True, include_optimizer)

    _save(model, filepath, lambda target: original(model, target, True, include_optimizer), read)


# The functions are bound by name in each of these modules; `Model.save` and `Model.save_weights` use those of saving_api.
@override("save_model", saving_api, keras.saving, keras.models)
@override("save_weights", saving_api, keras.saving)
def _ask_once(
    original: Callable[..., None], model: Any, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any
) -> None:
    strategy = None if overwrite else cluster_strategy(model)
    if strategy is not None:
        overwrite = chief_decides(strategy, "overwrite", strategy.cluster.is_chief and _may_write(filepath))
        if not overwrite:
            return
    original(model, filepath, overwrite, *args, **kwargs)


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
