"""The stores of a worker that only reads."""

import gc
import os
import tempfile
import weakref

import h5py
import numpy as np
import pytest
from keras.src.saving import saving_lib

from tfdist.checkpoint.discarding import DiscardingAssets, DiscardingFile, DiscardingShardedStore, DiscardingStore

pytestmark = pytest.mark.timeout(120)


class Readable:
    """A variable that counts its reads, and the values that are still alive."""

    def __init__(self, shape=(3, 5)):
        self.reads = 0
        self.shape = shape
        self.values = []

    def __array__(self, dtype=None, copy=None):
        self.reads += 1
        value = np.ones(self.shape, dtype or "float32").view(Value)
        self.values.append(weakref.ref(value))
        return value

    def alive(self):
        gc.collect()
        return sum(value() is not None for value in self.values)


class Value(np.ndarray):
    """An array that can be referred to weakly."""


def stores():
    return [DiscardingStore(), DiscardingShardedStore("a.weights.json", 1)]


@pytest.mark.parametrize("store", stores(), ids=lambda store: type(store).__name__)
def test_values_are_read_once_and_dropped(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variables = [Readable(), Readable(), Readable(())]
    entry = store.make("layers/dense", metadata={"name": "dense"})
    for index, variable in enumerate(variables):
        entry[str(index)] = variable
        assert variable.reads == 1
        assert variable.alive() == 0
    entry["half"] = np.ones(2, saving_lib.ml_dtypes.bfloat16)
    assert list(entry.keys()) == ["0", "1", "2", "half"]
    assert len(entry) == 4
    assert "1" in entry and "4" not in entry
    del entry["1"]
    assert "1" not in entry
    assert list(store.make("layers/other").keys()) == []
    assert store, "Keras asks whether there is a store"
    store.close()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("store", stores(), ids=lambda store: type(store).__name__)
def test_reading_back_is_refused(store):
    entry = store.make("layers/dense")
    entry["kernel"] = np.ones(3)
    with pytest.raises(NotImplementedError, match="must not read back"):
        entry["kernel"]
    with pytest.raises(KeyError):
        entry["bias"]


def test_weights_in_several_files(tmp_path, monkeypatch):
    """The same variables are refused as on the chief, and none else."""
    monkeypatch.chdir(tmp_path)
    kib = 1 / 1024**2
    store = DiscardingShardedStore("a.weights.json", kib)
    for layer in range(5):
        entry = store.make(f"layers/{layer}")
        for index in range(3):
            entry[str(index)] = np.ones(100, "float32")
    with pytest.raises(ValueError, match="exceeds the maximum shard size"):
        store.make("layers/large")["0"] = np.ones(300, "float32")
    assert store.current_shard_index > 3
    store.close()
    assert not os.listdir(tmp_path)


def test_a_file_of_the_legacy_format():
    file = DiscardingFile("a.h5")
    assert isinstance(file, h5py.File)
    file.attrs["keras_version"] = "3"
    group = file.create_group("model_weights").create_group("dense")
    group.create_dataset("kernel", (3, 5), dtype="float32")[:] = np.ones((3, 5))
    group.create_dataset("step", (), dtype="int64")[()] = 1
    assert list(group.keys()) == ["kernel", "step"]
    assert group.name == "/model_weights/dense"
    assert "a.h5" in repr(file)
    file.flush()
    file.close()


def test_assets_go_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assets = DiscardingAssets()
    assert assets, "Keras asks whether there is a store"
    assert not os.listdir(tmp_path), "no directory before a layer asks for one"
    for layer in ("", "layers/lookup"):
        directory = assets.make(layer)
        assert os.listdir(directory) == []
        with open(os.path.join(directory, "vocabulary.txt"), "w") as file:
            file.write("a")
        assert len(os.listdir(tmp_path)) == 1
    assets.close()
    assets.close()
    assert not os.listdir(tmp_path)
