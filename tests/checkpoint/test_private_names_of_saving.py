"""The private names of Keras that tfdist/checkpoint stands on: that they exist and do what is relied upon.

A failure here after an upgrade names what changed. (Not `test_private_names`: pytest takes test files by name, one of each.)
"""

import io

import h5py
import keras
import numpy as np
import pytest
import saved_models
import tensorflow as tf
from keras.callbacks import BackupAndRestore, CallbackList, CSVLogger, ModelCheckpoint, OrbaxCheckpoint
from keras.src.backend.tensorflow.layer import TFLayer
from keras.src.export import saved_model_export_archive
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_api, saving_lib
from keras.src.utils import file_utils, io_utils
from signatures import parameters
from tensorflow.python.ops import resource_variable_ops

from tfdist.checkpoint import FitBackup, plain_variables

pytestmark = pytest.mark.timeout(120)


OVERRIDDEN = {
    # tfdist/keras_hooks/saving.py
    (saving_lib, "save_model"): ["model", "filepath", "weights_format", "zipped"],
    (saving_lib, "save_weights_only"): ["model", "filepath", "max_shard_size", "objects_to_skip"],
    (legacy_h5_format, "save_model_to_hdf5"): ["model", "filepath", "overwrite", "include_optimizer"],
    (saving_api, "save_model"): ["model", "filepath", "overwrite", "zipped", "kwargs"],
    (saving_api, "save_weights"): ["model", "filepath", "overwrite", "max_shard_size", "kwargs"],
    (TFLayer, "_trackable_children"): ["self", "save_type", "kwargs"],
    # tfdist/keras_hooks/callbacks.py
    (ModelCheckpoint, "_should_save_model"): ["self", "epoch", "batch", "logs", "filepath"],
    (ModelCheckpoint, "_get_file_path"): ["self", "epoch", "batch", "logs"],
    (CallbackList, "on_train_begin"): ["self", "logs"],
    (CSVLogger, "on_train_begin"): ["self", "logs"],
    (CSVLogger, "on_epoch_end"): ["self", "epoch", "logs"],
    (CSVLogger, "on_train_end"): ["self", "logs"],
    (OrbaxCheckpoint, "set_model"): ["self", "model"],
}


@pytest.mark.parametrize(("owner", "name"), OVERRIDDEN, ids=lambda value: getattr(value, "__name__", value).rpartition(".")[2])
def test_what_is_overridden(owner, name):
    original = getattr(owner, name)._tfdist_original
    assert original.__module__.startswith("keras.src.")
    assert not hasattr(original, "_tfdist_original"), "overridden twice"
    assert parameters(original) == OVERRIDDEN[owner, name]


def test_what_a_fit_backup_overrides():
    """Keras calls nothing else of `BackupAndRestore`, nor with other arguments."""
    of_keras = {name: value for name, value in vars(BackupAndRestore).items() if callable(value)}
    assert set(of_keras) == {
        *("__init__", "on_train_begin", "on_train_batch_end", "on_epoch_end", "on_train_end"),
        *("_load_model", "_save_model", "_should_save_on_batch"),
    }
    for name in ("on_train_begin", "on_epoch_begin", "on_train_batch_end", "on_epoch_end", "on_train_end", "_save_model"):
        assert parameters(getattr(FitBackup, name)) == parameters(getattr(BackupAndRestore, name)), name


def test_every_export_of_the_functions_is_overridden():
    for name, exporters in {
        "save_model": (saving_api, keras.saving, keras.models),
        "save_weights": (saving_api, keras.saving),
    }.items():
        originals = {getattr(exporter, name)._tfdist_original for exporter in exporters}
        assert len(originals) == 1, name
    assert not hasattr(keras.models, "save_weights")


def test_the_overrides_are_where_models_are_saved(tmp_path, monkeypatch):
    """Every way to save passes by one of the functions, which it looks up in its module when it is called."""
    calls = []
    functions = [(saving_api, "save_model"), (saving_api, "save_weights"), (saving_lib, "save_model")]
    functions += [(saving_lib, "save_weights_only"), (legacy_h5_format, "save_model_to_hdf5")]

    def note(module, name):
        original, label = getattr(module, name), f"{module.__name__.rpartition('.')[2]}.{name}"
        monkeypatch.setattr(module, name, lambda *args, **kwargs: (calls.append(label), original(*args, **kwargs)))

    for module, name in functions:
        note(module, name)
    model = saved_models.sequential()
    model.save(tmp_path / "a.keras")
    model.save(tmp_path / "directory", zipped=False)
    model.save(tmp_path / "a.h5")
    model.save_weights(tmp_path / "a.weights.h5")
    model.save_weights(tmp_path / "a.weights.json", max_shard_size=1)
    assert calls == [
        *("saving_api.save_model", "saving_lib.save_model") * 2,
        *("saving_api.save_model", "legacy_h5_format.save_model_to_hdf5"),
        *("saving_api.save_weights", "saving_lib.save_weights_only") * 2,
    ]
    calls.clear()
    keras.saving.save_model(model, tmp_path / "a.keras")
    keras.saving.save_weights(model, tmp_path / "a.weights.h5")
    assert calls == ["saving_lib.save_model", "saving_lib.save_weights_only"]


def test_what_a_reader_calls():
    assert parameters(saving_lib._save_state) == [
        *("saveable", "weights_store", "assets_store", "inner_path", "visited_saveables")
    ]
    assert parameters(saving_lib._serialize_model_as_json) == ["model"]
    assert parameters(io_utils.ask_to_proceed_with_overwrite) == ["filepath"]
    for path in ("gs://bucket/a", "hf://user/model", "/cns/a"):
        assert file_utils.is_remote_path(path)
    assert not file_utils.is_remote_path("/tmp/a.keras")


def test_a_model_in_memory_needs_no_zip_suffix():
    """An object in memory is written by every worker, so Keras must not look at its name."""
    file = io.BytesIO()
    saving_lib.save_model(saved_models.sequential(), file)
    assert file.getvalue()[:2] == b"PK"


def test_the_stores_that_readers_replace(tmp_path):
    for store in (saving_lib.H5IOStore, saving_lib.ShardedH5IOStore):
        assert parameters(store._get_h5_file) == ["self", "path_or_io", "mode"]
        assert parameters(store.make) == ["self", "path", "metadata"]
    assert parameters(saving_lib.H5IOStore.__init__) == ["self", "path_or_io", "archive", "mode"]
    assert parameters(saving_lib.ShardedH5IOStore.__init__)[:3] == ["self", "path_or_io", "max_shard_size"]
    assert parameters(saving_lib.DiskIOStore.make) == ["self", "path"]
    opened = []

    class Opening(saving_lib.H5IOStore):
        def _get_h5_file(self, path_or_io, mode=None):
            opened.append(path_or_io)
            return super()._get_h5_file(path_or_io, mode)

    store = Opening(tmp_path / "a.h5", mode="w")
    store.make("layer")["0"] = keras.Variable([1.0, 2.0])
    store.close()
    assert opened == [tmp_path / "a.h5"]
    with h5py.File(tmp_path / "a.h5") as file:
        np.testing.assert_array_equal(file["layer/vars/0"], [1, 2])


def test_the_layout_of_a_backup(tmp_path):
    """The files, what the metadata say, and that a group more in the weights file does no harm."""
    callback = BackupAndRestore(str(tmp_path))
    assert callback._weights_path == str(tmp_path / "latest.weights.h5")
    assert callback._training_metadata_path == str(tmp_path / "training_metadata.json")
    assert callback._prev_weights_path == f"{callback._weights_path}.bkp"
    assert callback._prev_training_metadata_path == f"{callback._training_metadata_path}.bkp"
    assert (callback._current_epoch, callback._last_batch_seen) == (0, 0)
    assert callback.double_checkpoint is False
    model = saved_models.sequential()
    model.compile("sgd", "mse")
    callback.set_model(model)
    callback._current_epoch = 3
    callback._save_model()
    assert (tmp_path / "training_metadata.json").read_text() == '{"epoch": 3, "batch": 0}'
    with h5py.File(tmp_path / "latest.weights.h5", "r+") as file:
        file.create_group("tfdist/fit")
    callback.on_train_begin()
    assert model._initial_epoch == 3


def test_a_checkpoint_is_saved_where_its_path_says_if_it_should(tmp_path):
    """`_save_model` asks both overridden methods, makes the directory of the path, and saves the model itself."""
    asked = []

    class Asked(ModelCheckpoint):
        def _get_file_path(self, *args):
            asked.append("path")
            return str(tmp_path / "new" / "a.keras")

        def _should_save_model(self, *args):
            asked.append("should")
            return len(asked) > 2

    callback = Asked("a.keras")
    callback.set_model(saved_models.sequential())
    callback._save_model(0, None, {})
    assert not (tmp_path / "new").exists()
    callback._save_model(1, None, {})
    assert (tmp_path / "new" / "a.keras").exists()
    assert asked == ["path", "should"] * 2


def test_an_export_archive_knows_what_it_tracks_and_its_endpoints():
    """tfdist/keras_hooks/saving.py."""
    model = saved_models.sequential()
    archive = keras.export.ExportArchive()
    assert isinstance(archive, saved_model_export_archive.SavedModelExportArchive)
    archive.track_and_add_endpoint("go", model, input_signature=[keras.InputSpec(shape=(None, 5), dtype="float32")])
    assert archive._tracked == [model] and archive._endpoint_names == ["go"]
    assert plain_variables.called_by(archive._tf_trackable.go) == [model]


def test_a_resource_variable_is_made_without_creators():
    """tfdist/checkpoint/plain_variables.py."""
    with tf.variable_creator_scope(lambda *args, **kwargs: pytest.fail("asked for")):
        made = resource_variable_ops.ResourceVariable(initial_value=[1.0], trainable=False, name="plain")
        resource_variable_ops.UninitializedVariable(dtype=tf.float32, shape=(2,))
    assert isinstance(made, tf.Variable) and not made.trainable


def test_what_the_extra_state_stands_on():
    """tfdist/checkpoint/extra_state.py and checkpoint_children.py."""
    model = saved_models.sequential()
    model.compile(keras.optimizers.Adam(gradient_accumulation_steps=4))
    model.optimizer.build(model.trainable_variables)
    (dropout,) = [layer for layer in model.layers if isinstance(layer, keras.layers.Dropout)]
    assert [generator.state for generator in dropout._seed_generators] == [dropout.seed_generator.state]
    assert int(model.optimizer._iterations) == 0 and isinstance(dropout.seed_generator.state._value, tf.Variable)
    assert any(part is model.optimizer for part in tf.train.TrackableView(model).descendants())
    assert model.optimizer._trainable_variables == model.trainable_variables
    assert "seed_generator_0" not in dropout._trackable_children("checkpoint"), "of no tfdist strategy"
    stored = {}

    class Store(saving_lib.H5IOStore):
        def __setitem__(self, key, value):
            stored[self._h5_entry_path, key] = value

    store = Store(io.BytesIO(), mode="w")
    visited = {id(model.optimizer)}
    saving_lib._save_state(model, weights_store=store, assets_store=None, inner_path="", visited_saveables=visited)
    # Layers store their variables as they are, and what is visited is not asked.
    assert {id(value) for value in stored.values()} == {id(variable) for variable in model.weights}
    model.in_list = [keras.optimizers.SGD()]
    assert dict(saving_lib._walk_saveable(model))["in_list"] == model.in_list
