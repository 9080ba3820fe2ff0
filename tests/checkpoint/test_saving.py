"""Saving by two workers: both read the same, one writes, and the file is an ordinary one."""

import contextlib
import io
import os
import resource
import tempfile
import threading
import zipfile

import h5py
import keras
import numpy as np
import pytest
import saved_models
import tensorflow as tf
import two_workers
from grids import exhaustive
from keras.src.saving import saving_lib
from saved_models import BUILDS, compiled, state

from tfdist.sharding import assembly
from tfdist.strategy import ShardedStrategy

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300)]

FORMATS = {
    "model.keras": lambda model, path: model.save(path),
    "directory": lambda model, path: model.save(path, zipped=False),
    "model.weights.h5": lambda model, path: model.save_weights(path),
    "model.weights.json": lambda model, path: model.save_weights(path, max_shard_size=1e-6),
    "model.h5": lambda model, path: model.save(path),
}


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """An empty directory for temporary files, which must be empty again in the end."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    assert not list(directory.iterdir())


def load(path, model):
    """Returns what `path` holds, loaded in a plain model: a new one, or `model` with its weights."""
    if ".weights." not in path:
        return keras.saving.load_model(path)
    for variable in model.weights:
        variable.assign(np.zeros(variable.shape, variable.dtype))
    model.load_weights(path)
    return model


@pytest.mark.parametrize("build", [name if name in ("nested", "own_format") else exhaustive(name) for name in BUILDS])
def test_both_read_the_same_and_the_chief_writes(build, tmp_path, temporary, monkeypatch):
    """For every format. That both read the same in the same order is seen to by `two_workers`."""
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    shared.mkdir(), elsewhere.mkdir()
    # The legacy format knows neither subclassed models nor a layer's own format.
    formats = {file: save for file, save in FORMATS.items() if file != "model.h5" or build in ("sequential", "nested")}

    def program(worker):
        with worker.strategy.scope():
            model = compiled(BUILDS[build])
        worker.written.clear()
        begin, worker.saved = len(worker.meeting.done), {}
        for file, save in formats.items():
            save(model, str((shared if worker.is_chief else elsewhere) / file))
            worker.saved[file] = [entry for entry in worker.written if entry[0] in ("open", "h5py", "os.mkdir", "os.rename")]
            worker.written.clear()
        reads = worker.meeting.done[begin:]
        # On every worker, as soon as saving returns.
        model.load_weights(shared / "model.weights.h5")
        return reads, state(model)

    chief, reader, _ = two_workers.succeed(monkeypatch, program)
    reads, expected = chief.result
    assert len(reads) > len(formats) * len(expected) / 2, "hardly anything was read"
    assert all(chief.saved.values())
    for file, written in reader.saved.items():
        has_assets = build == "own_format" and ".weights." not in file
        assert bool(written) == has_assets, file
        assert all("tfdist-discarded-" in str(entry[1]) for entry in written)
    assert not list(elsewhere.iterdir())
    assert not [path for path in shared.iterdir() if "tfdist" in path.name]
    trained = compiled(BUILDS[build])
    assert len(expected) > 10
    for file in formats:
        loaded = state(load(str(shared / file), trained))
        if file == "model.h5":  # Keras builds no slots when it loads this format; the file has them
            with h5py.File(shared / file) as opened:
                names = opened["optimizer_weights"].attrs["weight_names"]
                loaded[len(trained.weights) :] = [opened["optimizer_weights"][name][()] for name in names]
        for index, (ours, plain) in enumerate(zip(expected, loaded, strict=True)):
            np.testing.assert_array_equal(ours, plain, err_msg=f"{file}, variable {index}")


def test_assets(tmp_path, temporary, monkeypatch):
    """Of a layer of Keras, and of one that reads a variable for it."""
    names = "vocabulary.keras", "own_format.keras"

    def program(worker):
        with worker.strategy.scope():
            models = saved_models.with_vocabulary(), saved_models.own_format()
        models[1].layers[-1].table.assign([3.0, 4.0])
        for name, model in zip(names, models, strict=True):
            model.save(tmp_path / name)

    *_, meeting = two_workers.succeed(monkeypatch, program)
    vocabulary, own_format = (keras.saving.load_model(tmp_path / name) for name in names)
    assert vocabulary.layers[0].get_vocabulary() == ["[UNK]", "a", "b"]
    np.testing.assert_array_equal(own_format.layers[-1].table, [3, 4])
    assert any(label.endswith("/table") for label in meeting.done)


def test_sharded_variables_are_read_in_one_order(cpus, tmp_path):
    """The reads that will be collectives, those of ShardedVariable, for a strategy of tfdist."""
    orders = {}
    for role in (two_workers.CHIEF, two_workers.READER):
        keras.backend.clear_session()
        strategy = two_workers.attach_cluster(ShardedStrategy(cpus[:2], zero_stage=3), role)
        strategy.barrier = lambda name: None
        with strategy.scope():
            model = compiled(saved_models.nested)
        reads = []

        def noting(variable, reads=reads):
            reads.append(variable.name)
            return assembly.assemble(variable)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tfdist.sharding.variable.assemble", noting)
            model.save(tmp_path / f"{role}.keras")
        orders[role] = reads
    assert len(orders["chief"]) >= len(model.trainable_variables) * 3  # Adam's slots are sharded too
    assert orders["chief"] == orders["reader"]
    assert [path.name for path in tmp_path.iterdir()] == ["chief.keras"]


@pytest.mark.parametrize("file", [file for file in FORMATS if file != "directory"])
def test_an_error_while_the_chief_writes_keeps_the_previous_file(file, tmp_path, temporary, monkeypatch):
    path = tmp_path / file

    @keras.saving.register_keras_serializable("tests")
    class Failing(keras.layers.Dense):
        def save_own_variables(self, store):
            super().save_own_variables(store)
            if getattr(two_workers.this_worker(), "fails", False):
                raise ConnectionError("the disk is gone")

    def program(worker):
        with worker.strategy.scope():
            model = compiled(lambda: keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), Failing(3)]))
        FORMATS[file](model, str(path))
        worker.before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir() if entry.is_file()}
        worker.meeting.attend(worker.role, "saved once")
        model.layers[0].kernel.assign(np.full((5, 4), 9.0))
        if worker.is_chief:
            worker.fails = True
            if file == "model.h5":  # no layer takes part in the writing of this format

                def flush(self):
                    raise ConnectionError("the disk is gone")

                monkeypatch.setattr("h5py.File.flush", flush)
        FORMATS[file](model, str(path))

    chief, reader, _ = two_workers.run(monkeypatch, program)
    assert isinstance(chief.error, ConnectionError)
    assert isinstance(reader.error, threading.BrokenBarrierError)
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir() if entry.is_file()} == chief.before
    assert not [entry for entry in tmp_path.iterdir() if "tfdist" in entry.name]


@contextlib.contextmanager
def no_files_beyond(number):
    """A block in which the operating system refuses to make a file of this process longer than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "file", ["model.keras", exhaustive("model.weights.h5"), exhaustive("model.h5"), "nowhere/model.weights.h5"]
)
def test_what_the_disk_refuses_is_raised_on_all_workers(file, tmp_path, temporary, monkeypatch):
    """The previous file is kept, and the workers are still in step: the next save succeeds."""
    save, path = FORMATS[file.removeprefix("nowhere/")], tmp_path / file

    def program(worker):
        model = small(worker, lambda: compiled(saved_models.nested))
        if path.parent.exists():
            save(model, str(path))
        worker.before = path.read_bytes() if path.exists() else None
        model.layers[1].kernel.assign(np.full((5, 4), 9.0))
        worker.meeting.attend(worker.role, "changed")
        with no_files_beyond(2000) if worker.is_chief else contextlib.nullcontext(), pytest.raises(OSError) as raised:
            save(model, str(path))
        worker.after = path.read_bytes() if path.exists() else None
        path.parent.mkdir(exist_ok=True)
        save(model, str(path))
        return str(raised.value)

    chief, reader, _ = two_workers.succeed(monkeypatch, program)
    assert chief.result == reader.result
    assert f"{path} cannot be written." in chief.result
    assert ("It needs" in chief.result and "is kept as it was" in chief.result) == (path.parent == tmp_path)
    assert chief.after == chief.before != path.read_bytes()
    assert not [name for name in os.listdir(path.parent) if "tfdist" in name]


@pytest.mark.parametrize("save", ["model.save", "save_model", "save_weights"])
@pytest.mark.parametrize("answer", ["y", "n"])
def test_the_chief_asks_before_overwriting(save, answer, tmp_path, monkeypatch):
    weights = save == "save_weights"
    path = tmp_path / ("model.weights.h5" if weights else "model.keras")
    path.write_bytes(b"precious")
    asked = []

    def ask(prompt):
        asked.append(two_workers.this_worker().role)
        return answer

    monkeypatch.setattr("builtins.input", ask)
    function = {
        "model.save": lambda model: model.save(path, overwrite=False),
        "save_model": lambda model: keras.saving.save_model(model=model, filepath=path, overwrite=False),
        "save_weights": lambda model: keras.saving.save_weights(model, path, overwrite=False),
    }[save]

    def program(worker):
        with worker.strategy.scope():
            function(saved_models.sequential())

    two_workers.succeed(monkeypatch, program)
    assert asked == ["chief"]
    assert (path.read_bytes() == b"precious") == (answer == "n")


def test_nothing_is_asked_where_there_is_no_file(tmp_path, monkeypatch):
    def program(worker):
        with worker.strategy.scope():
            saved_models.sequential().save(tmp_path / "model.keras", overwrite=False)

    two_workers.succeed(monkeypatch, program)
    assert zipfile.is_zipfile(tmp_path / "model.keras")


def small(worker, build=saved_models.sequential):
    with worker.strategy.scope():
        return build()


def refuse(call, build=saved_models.sequential):
    """Returns the error that every worker raises, before any of them waits."""

    def program(worker):
        with pytest.raises((ValueError, NotImplementedError)) as refused:
            call(small(worker, build))
        return str(refused.value)

    with pytest.MonkeyPatch.context() as patch:
        chief, reader, meeting = two_workers.succeed(patch, program)
    assert chief.result == reader.result
    assert not [done for done in meeting.done if "barrier" in done]
    return chief.result


def test_what_keras_refuses_is_refused_by_all(tmp_path):
    assert "expected a `.keras` extension" in refuse(lambda model: saving_lib.save_model(model, str(tmp_path / "model")))
    assert "should not end in" in refuse(lambda model: model.save(str(tmp_path / "model.keras"), zipped=False))
    assert "must end in `.weights.h5`" in refuse(lambda model: saving_lib.save_weights_only(model, str(tmp_path / "a.h5")))
    assert "Invalid filepath extension" in refuse(lambda model: model.save(str(tmp_path / "model.bin")))
    assert "not yet been built" in refuse(
        lambda model: model.save_weights(tmp_path / "a.weights.h5"), build=saved_models.Subclassed
    )
    assert '`weights_format` must be "h5"' in refuse(
        lambda model: saving_lib.save_model(model, str(tmp_path / "model.keras"), weights_format="npz")
    )
    assert not list(tmp_path.iterdir())


def test_a_variable_larger_than_a_file_may_be_is_refused_by_all(tmp_path, monkeypatch):
    def program(worker):
        with pytest.raises(ValueError, match="exceeds the maximum shard size"):
            small(worker).save_weights(tmp_path / "model.weights.json", max_shard_size=1e-9)

    two_workers.succeed(monkeypatch, program)
    assert not list(tmp_path.iterdir())


def test_every_worker_fills_its_own_object_in_memory(monkeypatch):
    def program(worker):
        file = io.BytesIO()
        small(worker).save(file, zipped=False, overwrite=False)  # Keras zips it nevertheless
        return file.getvalue()

    chief, reader, _ = two_workers.succeed(monkeypatch, program)
    for worker in (chief, reader):
        assert zipfile.is_zipfile(io.BytesIO(worker.result))


def test_remote_files_are_written_by_keras(monkeypatch):
    """Not staged: the chief hands the path to Keras."""
    paths = []
    original = saving_lib.save_weights_only._tfdist_original

    class Remote(io.BytesIO):
        def write(self, data):
            paths.append((two_workers.this_worker().role, len(data)))

    monkeypatch.setattr("keras.src.utils.file_utils.File", lambda path, mode: Remote())
    assert original.__module__ == "keras.src.saving.saving_lib"

    def program(worker):
        small(worker).save("gs://bucket/model.keras")

    two_workers.succeed(monkeypatch, program)
    assert [role for role, _ in paths] == ["chief"]


def test_a_model_put_together_outside_the_scope(tmp_path, monkeypatch):
    def program(worker):
        trained = small(worker)
        model = keras.Model(trained.inputs, trained.layers[0].output)
        assert model._distribute_strategy is None
        worker.written.clear()
        model.save(tmp_path / "model.keras")
        assert bool(worker.written) == worker.is_chief

    two_workers.succeed(monkeypatch, program)


def test_other_strategies_are_left_alone(cpus, tmp_path, monkeypatch):
    """No staging, no cluster: `staged` is not even called."""
    monkeypatch.setattr("tfdist.checkpoint.saving.staged", None)
    for index, strategy in enumerate([tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(cpus[:2])]):
        with strategy.scope():
            model = saved_models.sequential()
        for file, save in FORMATS.items():
            save(model, str(tmp_path / f"{index}{file}"))
            assert (tmp_path / f"{index}{file}").exists()


def test_one_worker_replaces_files_at_once(cpus, tmp_path, monkeypatch):
    replaced = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (replaced.append(os.path.basename(paths[1])), replace(*paths)))
    with ShardedStrategy(cpus[:2], zero_stage=3).scope():
        model = saved_models.sequential()
    for file, save in FORMATS.items():
        save(model, str(tmp_path / file))
        assert file in replaced
    assert not [path for path in tmp_path.iterdir() if "tfdist" in path.name]


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    """At the last read the file still is the old one; it is another, whole one when saving returns."""
    path = tmp_path / "model.weights.h5"
    path.write_bytes(b"old")
    seen = []

    def program(worker):
        model = small(worker)
        if worker.is_chief:
            close = saving_lib.H5IOStore.close
            monkeypatch.setattr(saving_lib.H5IOStore, "close", lambda self: (seen.append(path.read_bytes()), close(self)))
        model.save_weights(path)
        return path.read_bytes()

    chief, reader, _ = two_workers.succeed(monkeypatch, program)
    assert seen == [b"old"]
    assert chief.result == reader.result != b"old"
    assert not [name for name in os.listdir(tmp_path) if name != "model.weights.h5"]
