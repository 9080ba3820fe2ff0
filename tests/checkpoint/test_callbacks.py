"""The callbacks that write files, by two workers that train; and what another process makes of the files."""

import functools
import json
import math
import os
import shutil
import threading

import h5py
import keras
import numpy as np
import pytest
import two_workers
from grids import exhaustive
from saved_models import X, Y, sequential
from test_saving import no_files_beyond

from tfdist.checkpoint import BACKUP, FitBackup, backup_file, backups
from tfdist.checkpoint.backup_file import put_state
from tfdist.checkpoint.seal import BLOCK_BYTES
from tfdist.strategy import ShardedStrategy

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300)]


class Interrupted(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """The end of a job, at the beginning of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise Interrupted


def compiled():
    model = sequential()
    generator = np.random.default_rng(5)  # Keras's own seed is one for all threads
    model.set_weights([generator.normal(size=value.shape) for value in model.get_weights()])
    model.layers[1].rate = 0.0  # Keras saves no seeds: masks differ after a restart
    model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError())
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model, callbacks, epochs=4):
    return model.fit(X, Y, batch_size=6, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks).history


def weights(model):
    return [np.asarray(variable.value) for variable in model.weights + model.optimizer.variables]


def train_together(monkeypatch, callbacks, epochs=4, interrupted=False):
    """Trains a new model on both workers; `callbacks(worker)` makes the callbacks. `result`: model and history."""

    def program(worker):
        with worker.strategy.scope():
            model = compiled()
        worker.written.clear()
        worker.model, worker.history = model, None
        if interrupted:
            with pytest.raises(Interrupted):
                fit(model, callbacks(worker), epochs)
        else:
            worker.history = fit(model, callbacks(worker), epochs)
        worker.wrote = list(worker.written)

    return two_workers.succeed(monkeypatch, program)


def assert_only_the_chief_wrote(chief, reader):
    assert chief.wrote
    assert not reader.wrote


def assert_same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


# ModelCheckpoint


CHECKPOINTS = [
    {"filepath": "epochs/{epoch:02d}/model.keras"},
    {"filepath": "new/directory/{epoch}-{loss:.4f}.weights.h5", "save_weights_only": True},
    {"filepath": "batches/e{epoch}b{batch}.weights.h5", "save_weights_only": True, "save_freq": 3},
    {"filepath": "best/best.keras", "save_best_only": True, "monitor": "loss"},
    {"filepath": "old/model.h5"},
]


def test_model_checkpoint(tmp_path, monkeypatch):
    def callbacks(directory):
        paths = [str(directory / arguments["filepath"]) for arguments in CHECKPOINTS]
        return [
            keras.callbacks.ModelCheckpoint(**{**arguments, "filepath": path})
            for path, arguments in zip(paths, CHECKPOINTS, strict=True)
        ]

    ours, plain = tmp_path / "ours", tmp_path / "plain"
    chief, reader, _ = train_together(monkeypatch, lambda worker: callbacks(ours))
    assert_only_the_chief_wrote(chief, reader)
    single = compiled()
    fit(single, callbacks(plain))
    files = sorted(path.relative_to(plain) for path in plain.rglob("*"))
    assert {str(path.parts[0]) for path in files} == {arguments["filepath"].split("/")[0] for arguments in CHECKPOINTS}
    assert sorted(path.relative_to(ours) for path in ours.rglob("*")) == files
    for arguments in CHECKPOINTS:
        directory = ours / arguments["filepath"].split("/")[0]
        last = max((path for path in directory.rglob("*.*")), key=os.path.getmtime)
        if last.name.endswith(".weights.h5"):
            single.load_weights(last)
        else:
            single = keras.saving.load_model(last)
        if "b{batch}" not in arguments["filepath"]:
            assert_same(single.get_weights(), [np.asarray(v.value) for v in chief.model.weights])


def test_the_chief_decides_what_is_best(tmp_path, monkeypatch):
    """Where the workers' logs differ: else one would save, and wait for the other."""

    class Score(keras.callbacks.Callback):
        def __init__(self, scores):
            super().__init__()
            self.scores = scores

        def on_epoch_end(self, epoch, logs=None):
            logs["score"] = self.scores[epoch]

    def callbacks(worker):
        path = str(tmp_path / "{epoch}-{score}.weights.h5")
        options = {"save_weights_only": True, "save_best_only": True, "monitor": "score", "mode": "max"}
        scores = [1, 0, 2, 1] if worker.is_chief else [4, 5, 3, 6]
        return [Score(scores), keras.callbacks.ModelCheckpoint(path, **options)]

    train_together(monkeypatch, callbacks)
    assert sorted(os.listdir(tmp_path)) == ["1-1.weights.h5", "3-2.weights.h5"]


# BackupAndRestore


@pytest.mark.parametrize("options", [exhaustive({}), exhaustive({"double_checkpoint": True}), {"save_freq": 1}], ids=str)
def test_a_run_that_is_cut_goes_on_where_it_was(options, tmp_path, monkeypatch):
    directory = tmp_path / "new" / "backup"

    def backup():
        return keras.callbacks.BackupAndRestore(str(directory), **options)

    chief, reader, _ = train_together(monkeypatch, lambda worker: [backup(), Interrupt(2)], interrupted=True)
    assert_only_the_chief_wrote(chief, reader)
    names = {"latest.weights.h5", "training_metadata.json"}
    if options.get("double_checkpoint"):
        names |= {f"{name}.bkp" for name in names}
    assert set(os.listdir(directory)) == names
    before = weights(chief.model)
    restored = {}

    class AtBegin(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            restored.setdefault(two_workers.this_worker().role, (epoch, weights(self.model)))

    chief, reader, _ = train_together(monkeypatch, lambda worker: [backup(), AtBegin()])
    is_of_step = "save_freq" in options and BACKUP.now is not FitBackup  # the epoch of the last batch is noted then
    epoch = 1 if is_of_step else 2
    for role in ("chief", "reader"):
        assert restored[role][0] == epoch
        assert_same(restored[role][1], before)
    assert_only_the_chief_wrote(chief, reader)
    for worker in (chief, reader):
        assert len(worker.history["loss"]) == 4 - epoch
        if epoch == 2:
            assert_same(weights(worker.model), weights_of_an_uncut_run())
    assert not directory.exists()


@functools.cache
def weights_of_an_uncut_run():
    model = compiled()
    fit(model, [])
    return weights(model)


def interrupted_backup(monkeypatch, directory, epoch, **options):
    """Leaves a backup of the beginning of `epoch`; returns the weights it has."""
    chief, *_ = train_together(
        monkeypatch,
        lambda worker: [keras.callbacks.BackupAndRestore(str(directory), **options), Interrupt(epoch)],
        interrupted=True,
    )
    return weights(chief.model)


@pytest.fixture(scope="module")
def backup(tmp_path_factory):
    """Returns a function that puts a backup of the beginning of an epoch into a directory, and returns the weights it has."""
    made = {}

    def put(directory, epoch=2):
        if epoch not in made:
            own = tmp_path_factory.mktemp("backup") / str(epoch)
            with pytest.MonkeyPatch.context() as patch:
                made[epoch] = own, interrupted_backup(patch, own, epoch)
        own, weights = made[epoch]
        shutil.copytree(own, directory, dirs_exist_ok=True)
        return weights

    return put


def unseal(path):
    """Makes a sealed file one of a program that seals none, which may be changed."""
    with open(path, "r+b") as file:
        file.write(bytes(BLOCK_BYTES))


class Begun(keras.callbacks.Callback):
    """Notes what a run begins with, and ends it."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch, self.weights = epoch, weights(self.model)
        raise Interrupted


def begin(monkeypatch, directory, **options):
    """Returns the (epoch, weights) with which each worker goes on."""
    begun = {"chief": Begun(), "reader": Begun()}
    train_together(
        monkeypatch,
        lambda worker: [keras.callbacks.BackupAndRestore(str(directory), **options), begun[worker.role]],
        interrupted=True,
    )
    return [(callback.epoch, callback.weights) for callback in begun.values()]


def test_keras_without_tfdist_reads_the_backup_and_the_reverse(tmp_path, monkeypatch, backup):
    before = backup(tmp_path)
    begun = Begun()
    with pytest.raises(Interrupted):
        fit(compiled(), [keras.callbacks.BackupAndRestore(str(tmp_path)), begun])
    assert begun.epoch == 2
    assert_same(begun.weights, before)
    # Keras writes no state of `fit`: its metadata count again.
    plain = compiled()
    with pytest.raises(Interrupted):
        fit(plain, [keras.callbacks.BackupAndRestore(str(tmp_path)), Interrupt(3)])
    for epoch, restored in begin(monkeypatch, tmp_path):
        assert epoch == 3
        assert_same(restored, weights(plain))


def test_killed_between_the_weights_and_the_epoch(tmp_path, monkeypatch):
    """The new weights are there, the metadata are of the epoch before: what is in the file counts."""
    write_bytes = backups.write_bytes
    kept = []

    def dying(path, content):
        kept.append(path)
        if len(kept) == 2:  # the metadata of the second epoch
            raise Interrupted
        write_bytes(path, content)

    def program(worker):
        with worker.strategy.scope():
            worker.model = compiled()
        fit(worker.model, [keras.callbacks.BackupAndRestore(str(tmp_path))])

    with monkeypatch.context() as patch:
        patch.setattr(backups, "write_bytes", dying)
        chief, reader, _ = two_workers.run(patch, program)
    assert isinstance(chief.error, Interrupted)
    assert isinstance(reader.error, threading.BrokenBarrierError)
    assert json.loads((tmp_path / "training_metadata.json").read_text())["epoch"] == 1
    for epoch, restored in begin(monkeypatch, tmp_path):
        assert epoch == 2
        assert_same(restored, weights(chief.model))


def test_killed_while_the_weights_are_written(tmp_path, monkeypatch, backup):
    """The backup before is whole, with its epoch."""
    before = backup(tmp_path, epoch=1)

    def dying(file, name, state):
        put_state(file, name, state)
        if name == "callbacks":  # the last one
            raise Interrupted

    def program(worker):
        with worker.strategy.scope():
            model = compiled()
        fit(model, [keras.callbacks.BackupAndRestore(str(tmp_path))])

    with monkeypatch.context() as patch:
        patch.setattr(backup_file, "put_state", dying)
        chief, *_ = two_workers.run(patch, program)
    assert isinstance(chief.error, Interrupted)
    for epoch, restored in begin(monkeypatch, tmp_path):
        assert epoch == 1
        assert_same(restored, before)


class FullDisk(keras.callbacks.Callback):
    """From an epoch on there is no room for a file on the chief's disk."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and two_workers.this_worker().is_chief:
            self.limit = no_files_beyond(1500)
            self.limit.__enter__()


@pytest.mark.parametrize("double", [True, exhaustive(False)])
def test_a_full_disk_is_told_to_all_and_the_backup_before_stays(double, tmp_path, monkeypatch):
    full = {"chief": FullDisk(), "reader": FullDisk()}
    told = {}

    def program(worker):
        with worker.strategy.scope():
            model = compiled()
        with pytest.raises(OSError) as raised:
            backup = keras.callbacks.BackupAndRestore(str(tmp_path), double_checkpoint=double)
            fit(model, [backup, full[worker.role]])
        told[worker.role] = str(raised.value)

    try:
        two_workers.succeed(monkeypatch, program)
    finally:
        full["chief"].limit.__exit__(None, None, None)
    assert told["chief"] == told["reader"]
    assert "File too large: " in told["chief"] and "cannot be written. It needs" in told["chief"]
    for epoch, _ in begin(monkeypatch, tmp_path):
        assert epoch == 2


def test_an_unreadable_backup_gives_way_to_the_previous_one(tmp_path, monkeypatch, backup):
    previous = backup(tmp_path / "made", epoch=1)
    interrupted_backup(monkeypatch, tmp_path / "made", epoch=2, double_checkpoint=True)
    for has_epoch in (True, False):
        directory = tmp_path / str(has_epoch)
        shutil.copytree(tmp_path / "made", directory)
        with open(directory / "latest.weights.h5", "r+b") as file:  # one number of the weights or the like, which HDF5 reads
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
        if not has_epoch:  # as Keras without tfdist writes it
            (directory / "training_metadata.json.bkp").unlink()
            unseal(directory / "latest.weights.h5.bkp")
            with h5py.File(directory / "latest.weights.h5.bkp", "r+") as file:
                del file["tfdist/fit"]
        for epoch, restored in begin(monkeypatch, directory, double_checkpoint=True):
            assert epoch == (1 if has_epoch else 0), "the epoch of the unreadable backup is not the previous one's"
            assert_same(restored, previous)


def test_without_a_previous_one_an_unreadable_backup_is_said_to_be_so(tmp_path, monkeypatch, backup, capsys):
    backup(tmp_path)
    (tmp_path / "latest.weights.h5").write_bytes(b"\x89HDF no")
    assert [epoch for epoch, _ in begin(monkeypatch, tmp_path)] == [0, 0]
    said = capsys.readouterr().out
    assert f"the backup {tmp_path}/latest.weights.h5 cannot be read: " in said
    assert "; there is none before it, and training begins anew" in said
    shutil.copy(tmp_path / "latest.weights.h5", tmp_path / "latest.weights.h5.bkp")
    assert [epoch for epoch, _ in begin(monkeypatch, tmp_path)] == [0, 0]
    assert "; nor can the one before it: OSError: " in capsys.readouterr().out


def test_a_backup_of_another_model_is_refused_by_name(tmp_path, monkeypatch, backup):
    backup(tmp_path)

    def program(worker):
        with worker.strategy.scope():
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6), keras.layers.Dropout(0.5), keras.layers.Dense(3)])
            model.compile("sgd", "mse")
        fit(model, [keras.callbacks.BackupAndRestore(str(tmp_path))])

    chief, reader, _ = two_workers.run(monkeypatch, program)
    said = [str(worker.error) for worker in (chief, reader) if not isinstance(worker.error, threading.BrokenBarrierError)]
    assert said
    for message in said:
        assert message.startswith("The backup cannot be loaded into this model: ")
        assert f"path='{tmp_path}/latest.weights.h5'" in message


def test_a_directory_that_is_not_shared_is_refused(tmp_path, monkeypatch, backup):
    backup(tmp_path / "chief")
    (tmp_path / "reader").mkdir()

    def program(worker):
        with worker.strategy.scope():
            model = compiled()
        fit(model, [keras.callbacks.BackupAndRestore(str(tmp_path / worker.role))])

    def assert_is_refused():
        with monkeypatch.context() as patch:
            _, reader, _ = two_workers.run(patch, program)
        assert isinstance(reader.error, RuntimeError)
        assert "`backup_dir` must be on a file system that all workers share" in str(reader.error)
        assert "Received: backup_dir='" in str(reader.error)

    assert_is_refused()
    shutil.move(tmp_path / "chief" / "latest.weights.h5", tmp_path / "reader")
    assert_is_refused()


def test_a_backup_with_a_loss_that_is_no_number(tmp_path, monkeypatch, backup):
    """NaN does not equal itself, and all workers see one backup nevertheless."""
    backup(tmp_path)
    unseal(tmp_path / "latest.weights.h5")
    with h5py.File(tmp_path / "latest.weights.h5", "r+") as file:
        state = json.loads(file["tfdist/fit/json"][()].tobytes())
        del file["tfdist/fit"]
        put_state(file, "fit", {"json": np.frombuffer(json.dumps({**state, "logs": {"loss": math.nan}}).encode(), np.uint8)})
    assert [epoch for epoch, _ in begin(monkeypatch, tmp_path)] == [2, 2]


def test_a_backup_that_is_kept(tmp_path, monkeypatch):
    chief, reader, _ = train_together(
        monkeypatch, lambda worker: [keras.callbacks.BackupAndRestore(str(tmp_path), delete_checkpoint=False)]
    )
    assert_only_the_chief_wrote(chief, reader)
    assert sorted(os.listdir(tmp_path)) == ["latest.weights.h5", "training_metadata.json"]
    # All epochs are done: the next run only loads, and removes the backup when both have.
    chief, reader, meeting = train_together(monkeypatch, lambda worker: [keras.callbacks.BackupAndRestore(str(tmp_path))])
    assert chief.history == reader.history == {}
    assert not tmp_path.exists()
    assert [done.split("/")[-1] for done in meeting.done[-3:]] == ["begin", "remove", "end"]


# Others


def test_csv_logger(tmp_path, monkeypatch):
    def callbacks(worker):
        return [keras.callbacks.CSVLogger(str(tmp_path / f"{append}.csv"), append=append) for append in (False, True)]

    for _ in range(2):
        chief, reader, _ = train_together(monkeypatch, callbacks, epochs=2)
        assert_only_the_chief_wrote(chief, reader)
    for append, epochs in ((False, ["0", "1"]), (True, ["0", "1", "0", "1"])):
        lines = (tmp_path / f"{append}.csv").read_text().splitlines()
        assert [line.split(",")[0] for line in lines] == ["epoch", *epochs]


@pytest.mark.parametrize("workers", [1, 2])
def test_orbax_is_refused(workers, cpus):
    callback = object.__new__(keras.callbacks.OrbaxCheckpoint)  # Orbax need not be installed
    callback.directory = "backups"
    strategy = ShardedStrategy(cpus[:1])
    if workers > 1:
        strategy = two_workers.attach_cluster(strategy, two_workers.READER)
    with strategy.scope():
        model = sequential()
    with pytest.raises(NotImplementedError, match="Received: directory='backups'. Use `keras.callbacks.ModelCheckpoint`"):
        callback.set_model(model)


def test_one_process_goes_on_too(cpus, tmp_path):
    """Weights and epoch in one file, which is replaced at once."""
    directory = tmp_path / "backup"

    def train(*callbacks):
        with ShardedStrategy(cpus[:2], zero_stage=3).scope():
            model = compiled()
        fit(model, [keras.callbacks.BackupAndRestore(str(directory), double_checkpoint=True), *callbacks])
        return model

    with pytest.raises(Interrupted):
        train(Interrupt(2))
    assert backup_file.read(str(directory / "latest.weights.h5"))[0]["epoch"] == 2
    (directory / "latest.weights.h5").write_bytes(b"\x89HDF no")
    begun = Begun()
    with pytest.raises(Interrupted):
        train(begun)
    assert begun.epoch == 1
    assert_same(weights(train()), weights_of_an_uncut_run())
    assert not directory.exists()


def test_other_strategies_are_left_alone(tmp_path, monkeypatch):
    for name in ("chief_decides", "BACKUP.now.begin", "ITERATOR"):
        monkeypatch.setattr(f"tfdist.keras_hooks.callbacks.{name}", None)
    callbacks = [
        keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), delete_checkpoint=False),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "checkpoints" / "{epoch}.keras")),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
    ]
    model = compiled()
    fit(model, callbacks, epochs=2)
    assert sorted(os.listdir(tmp_path)) == ["backup", "checkpoints", "log.csv"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1.keras", "2.keras"]
    fit(model, callbacks, epochs=2)
    assert model._initial_epoch == 2
