"""Saving: under several workers all read the model's variables, and the chief alone writes the file; exports are plain."""

import inspect
import io
from collections.abc import Callable, Iterable
from typing import Any

from tfdist.checkpoint import (
    all_workers_inside,
    checkpoint_children,
    cluster_strategy_of,
    plain_variables,
    saving,
    tensorflow_checkpoints,
    tfdist_strategy,
)
from tfdist.keras_hooks.table import replaces
from tfdist.keras_layers import checkpoint_names
from tfdist.sharding.compression import COMPRESSION

_MANY_WRITERS = "Every worker would write the same file, and a variable that is sharded can only be read by all workers together."


@replaces(
    "keras.src.saving.saving_lib",
    "save_model",
    signature=("(model, filepath, weights_format='h5', zipped=True)", "(model, filepath, zipped=True)"),
    why=_MANY_WRITERS,
)
def _save_model(original: Callable[..., None], model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
    def write(target: Any) -> None:
        original(model, target, *args, **kwargs)

    given = inspect.signature(original).bind(model, filepath, *args, **kwargs).arguments
    path, zipped = str(filepath), given.get("zipped", True)
    refused = zipped != path.endswith(".keras") or (zipped and path.startswith("hf://"))
    if isinstance(filepath, io.IOBase):
        COMPRESSION.now.complete_copies(model.variables)
    # An object in memory is no file: each worker fills its own. What Keras refuses, it refuses on every worker.
    if tfdist_strategy(model) is None or isinstance(filepath, io.IOBase) or refused:
        write(filepath)
    else:
        saving.save_model(model, filepath, given.get("weights_format", "h5"), write)


@replaces("keras.src.saving.saving_lib", "save_weights_only", why=_MANY_WRITERS)
def _save_weights_only(
    original: Callable[..., None],
    model: Any,
    filepath: Any,
    max_shard_size: float | None = None,
    objects_to_skip: Iterable[Any] | None = None,
) -> None:
    def write(target: Any) -> None:
        original(model, target, max_shard_size, objects_to_skip)

    suffixes = (".weights.h5",) if max_shard_size is None else ("weights.h5", "weights.json")
    refused = not model.built or not str(filepath).endswith(suffixes)
    if tfdist_strategy(model) is None or refused:
        write(filepath)
    else:
        saving.save_weights(model, filepath, max_shard_size, objects_to_skip, write)


@replaces("keras.src.legacy.saving.legacy_h5_format", "save_model_to_hdf5", why=_MANY_WRITERS)
def _save_model_to_hdf5(
    original: Callable[..., None], model: Any, filepath: Any, overwrite: bool = True, include_optimizer: bool = True
) -> None:
    if tfdist_strategy(model) is None:
        original(model, filepath, overwrite, include_optimizer)
    else:
        saving.save_model_to_hdf5(model, filepath, lambda target: original(model, target, True, include_optimizer))


# Keras binds these by name in each module that exports them.
_SAVE_MODEL = "(model, filepath, overwrite=True, zipped=None, **kwargs)"
_SAVE_WEIGHTS = "(model, filepath, overwrite=True, max_shard_size=None, **kwargs)"


@replaces("keras.src.saving.saving_api", "save_model", signature=_SAVE_MODEL)
@replaces("keras.saving", "save_model", signature=_SAVE_MODEL)
@replaces("keras.models", "save_model", signature=_SAVE_MODEL)
@replaces("keras.src.saving.saving_api", "save_weights", signature=_SAVE_WEIGHTS)
@replaces("keras.saving", "save_weights", signature=_SAVE_WEIGHTS)
def _ask_once(
    original: Callable[..., None], model: Any, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any
) -> None:
    """Every worker would ask whether to overwrite the file."""
    if not overwrite and tfdist_strategy(model) is not None:
        overwrite = saving.may_write(model, filepath)
        if not overwrite:
            return
    original(model, filepath, overwrite, *args, **kwargs)


@replaces("keras.src.saving.saving_lib", "_get_unique_name")
def _get_unique_name(original: Callable[[str, dict[str, int]], str], name: str, used_names: dict[str, int]) -> str:
    """Keras names a layer's weights in a file after its class: a tensor-parallel layer's must be found under the name of the
    layer that it is outside replicas."""
    return original(checkpoint_names.SAVED_AS.get(name, name), used_names)


@replaces("keras.src.backend.tensorflow.layer.TFLayer", "_trackable_children")
def _layer_children(original: Callable[..., Any], self: Any, save_type: str = "checkpoint", **kwargs: Any) -> Any:
    """`tf.train.Checkpoint` sees no seed generators: a run that goes on from one would draw again what it has drawn before."""
    children = original(self, save_type, **kwargs)
    return {**children, **checkpoint_children.seed_states(self)} if save_type == "checkpoint" else children


@replaces(
    "keras.optimizers.MultiOptimizer",
    "_trackable_children",
    signature="(self, save_type=<SaveType.CHECKPOINT: 'checkpoint'>, **kwargs)",
)
def _optimizer_children(original: Callable[..., Any], self: Any, save_type: str = "checkpoint", **kwargs: Any) -> Any:
    """`tf.train.Checkpoint` does not see the optimizers within: a run that goes on from one would begin with new moments."""
    children = original(self, save_type, **kwargs)
    return {**children, **checkpoint_children.inner_optimizers(self)} if save_type == "checkpoint" else children


_ONE_PATH = """Every worker would write, record and remove the same files of a `tf.train.Checkpoint` at once, and fail over each
other's."""


@replaces("tensorflow.python.checkpoint.checkpoint.Checkpoint", "_write", why=_ONE_PATH)
def _write_checkpoint(original: Callable[..., Any], self: Any, file_prefix: str, options: Any = None) -> Any:
    return tensorflow_checkpoints.write_checkpoint(self, file_prefix, lambda: original(self, file_prefix, options))


@replaces("tensorflow.python.checkpoint.checkpoint.Checkpoint", "_async_checkpointer")
def _in_background(original: Callable[..., Any], self: Any) -> Any:
    """A thread would write, by itself on every worker, what only all can read together."""
    tensorflow_checkpoints.refuse_background(self)
    return original(self)


@replaces("tensorflow.python.checkpoint.functional_saver.MultiDeviceSaver", "save", why=_ONE_PATH)
def _save_tensors(original: Callable[..., Any], self: Any, file_prefix: Any, options: Any = None) -> Any:
    reads = tensorflow_checkpoints.only_reads.get()
    return tensorflow_checkpoints.read_tensors(self) if reads else original(self, file_prefix, options)


_RECORD = """(save_dir, model_checkpoint_path, all_model_checkpoint_paths=None, latest_filename=None, save_relative_paths=False, \
all_model_checkpoint_timestamps=None, last_preserved_timestamp=None)"""
_MANAGEMENT = "tensorflow.python.checkpoint.checkpoint_management"


@replaces(_MANAGEMENT, "update_checkpoint_state_internal", signature=_RECORD, why=_ONE_PATH)
@replaces(_MANAGEMENT, "_delete_file_if_exists", signature="(filespec)", why=_ONE_PATH)
def _record_or_remove(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if not tensorflow_checkpoints.only_reads.get():
        original(*args, **kwargs)


_PLAIN = """What is exported would read the variables of several devices, or shards, which a SavedModel cannot hold: while it is
traced and written, the model's variables are plain ones on the host."""


@replaces(
    "keras.Model",
    "export",
    signature="(self, filepath, format='tf_saved_model', verbose=None, input_signature=None, **kwargs)",
    why=_PLAIN,
)
def _export(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    _export_plain([self], lambda: original(self, *args, **kwargs))


@replaces("keras.src.export.saved_model_export_archive.SavedModelExportArchive", "write_out", why=_PLAIN)
def _write_out(original: Callable[..., None], self: Any, filepath: Any, options: Any = None, verbose: bool = True) -> None:
    resources = list(getattr(self, "_tracked", ()))
    for name in self._endpoint_names:
        resources += plain_variables.called_by(getattr(self._tf_trackable, name))
    _export_plain(resources, lambda: original(self, filepath, options, verbose))


@replaces("tensorflow.python.saved_model.save", "save", why=_PLAIN)
@replaces("tensorflow.saved_model", "save", why=_PLAIN)
def _save_saved_model(
    original: Callable[..., None], obj: Any, export_dir: str, signatures: Any = None, options: Any = None
) -> None:
    _export_plain([obj], lambda: original(obj, export_dir, signatures, options))


@replaces("tensorflow.lite.python.lite.TFLiteKerasModelConverterV2", "convert")
def _convert(original: Callable[..., Any], self: Any) -> Any:
    """It writes a SavedModel to a folder of its own and reads it again: each worker, though it is given the bytes, would find
    that the chief alone has written."""
    return _export_plain([self._keras_model], lambda: original(self), is_for_all=True)


def _export_plain(resources: list[Any], write: Callable[[], Any], is_for_all: bool = False) -> Any:
    """Returns what `write` returns, called where the variables in `resources` are plain ones; of several workers by the chief."""
    variables = plain_variables.variables_of(resources)
    if not variables:  # of no strategy, or within another export
        return write()
    strategy = cluster_strategy_of(variables)
    if strategy is None:
        COMPRESSION.now.complete_copies(variables)
        with plain_variables.plain(variables):
            return write()
    writes = is_for_all or strategy.cluster.is_chief
    with all_workers_inside(strategy, "export"):
        COMPRESSION.now.complete_copies(variables)
        with plain_variables.plain(variables, only_read=not writes):
            return write() if writes else None
