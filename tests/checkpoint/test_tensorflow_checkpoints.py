"""`tf.train.CheckpointManager` on two workers with one path: all read, the chief writes, and all restore."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
import two_workers

from tfdist.checkpoint import tensorflow_checkpoints
from tfdist.sharding import variable as sharded_variables
from tfdist.strategy import ShardedStrategy

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(120)]


def model_and_checkpoint(worker):
    with worker.strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
    return model, tf.train.Checkpoint(model=model, optimizer=optimizer)


def save(worker, folder, saves=3, **arguments):
    """Saves, with other weights each time; returns the paths, and the manager."""
    model, checkpoint = model_and_checkpoint(worker)
    manager = tf.train.CheckpointManager(checkpoint, folder, 2, **arguments)
    worker.written.clear()
    paths = []
    for number in range(saves):
        for variable in model.variables:
            variable.assign(np.full(variable.shape, number))
        paths.append(manager.save())
    return paths, manager


def files(folder):
    return sorted(os.listdir(folder))


WHOLE = ["checkpoint", *(f"ckpt-{number}.{end}" for number in (2, 3) for end in ("data-00000-of-00001", "index"))]


def test_one_path(tmp_path, monkeypatch):
    folder = str(tmp_path / "checkpoints")

    def program(worker):
        paths, manager = save(worker, folder)
        assert paths == [f"{folder}/ckpt-{number}" for number in (1, 2, 3)]
        assert manager.checkpoints == paths[1:] and manager.latest_checkpoint == paths[2]
        found = files(folder)
        # As a program that is started again, as soon as saving returns.
        model, checkpoint = model_and_checkpoint(worker)
        latest = tf.train.CheckpointManager(checkpoint, folder, 2).latest_checkpoint
        checkpoint.restore(latest).assert_consumed()
        return found, latest, model.get_weights()

    chief, reader, _ = two_workers.succeed(monkeypatch, program)
    for found, latest, weights in (chief.result, reader.result):
        assert found == WHOLE and latest == f"{folder}/ckpt-3"
        for value in weights:
            np.testing.assert_array_equal(value, np.full(value.shape, 2))


def test_checkpoint_without_a_manager(tmp_path, monkeypatch):
    def program(worker):
        _, checkpoint = model_and_checkpoint(worker)
        return checkpoint.save(str(tmp_path / "saved")), checkpoint.write(tmp_path / "written")

    for worker in two_workers.succeed(monkeypatch, program)[:2]:
        assert worker.result == (f"{tmp_path}/saved-1", f"{tmp_path}/written")
    assert tf.train.latest_checkpoint(tmp_path) == f"{tmp_path}/saved-1"
    assert len(files(tmp_path)) == 5


@pytest.mark.parametrize("is_local", [False, True], ids=["another_path", "a_disk_of_its_own"])
def test_a_folder_of_its_own_is_written(is_local, tmp_path, monkeypatch):
    """A worker that was given another path than the chief writes there, and so does one whose disk the chief does not write."""

    def program(worker):
        folder = tmp_path / worker.role
        if is_local:
            folder.mkdir()
            path = two_workers.this_worker().role  # one name, in folders of two machines
            monkeypatch.setattr(
                "tfdist.checkpoint.tensorflow_checkpoints._whole", lambda path: path.replace("chief", "x").replace("reader", "x")
            )
            assert path in str(folder)
        return save(worker, str(folder))[0]

    for worker in two_workers.succeed(monkeypatch, program)[:2]:
        assert worker.result[-1] == f"{tmp_path}/{worker.role}/ckpt-3"
        assert files(tmp_path / worker.role) == WHOLE


def test_what_the_chief_cannot_write_is_raised_on_all(tmp_path, monkeypatch):
    def program(worker):
        _, checkpoint = model_and_checkpoint(worker)
        if worker.is_chief:
            (tmp_path / "ckpt-1.index").mkdir()  # in the place of a file
        said = []
        for _ in range(2):
            try:
                checkpoint.save(f"{tmp_path}/ckpt")
                said.append("")
            except (tf.errors.OpError, OSError) as error:
                said.append(str(error))
        return said

    chief, reader, _ = two_workers.succeed(monkeypatch, program)
    assert chief.result[0] and reader.result[0] == f"{tmp_path}/ckpt-1 was not written: {chief.result[0]}"
    assert chief.result[1] == reader.result[1] == "", "who goes on saves the next one"
    assert tf.train.latest_checkpoint(tmp_path) == f"{tmp_path}/ckpt-2"


def test_in_the_background_is_refused(tmp_path, monkeypatch):
    def program(worker):
        _, checkpoint = model_and_checkpoint(worker)
        for save in (checkpoint.save, checkpoint.write):
            with pytest.raises(NotImplementedError, match="cannot be written in the background under several workers"):
                save(str(tmp_path / "ckpt"), tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True))

    two_workers.succeed(monkeypatch, program)


def test_who_writes_nothing_reads_the_same(tmp_path, monkeypatch, cpus):
    """Reading a sharded variable is a collective: a worker that leaves the file to the chief must take part in all of them."""
    with ShardedStrategy(cpus[:2], zero_stage=3).scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
    read = []
    assemble = sharded_variables.assemble
    monkeypatch.setattr(sharded_variables, "assemble", lambda sharded: (read.append(sharded.name), assemble(sharded))[1])
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.write(str(tmp_path / "written"))
    reads, read[:] = list(read), []
    token = tensorflow_checkpoints.only_reads.set(True)
    checkpoint.write(str(tmp_path / "only_read"))
    tensorflow_checkpoints.only_reads.reset(token)
    assert read == reads and len(set(reads)) == 6
    assert {path.stem for path in tmp_path.iterdir()} == {"written"}


def test_other_strategies_are_left_alone(tmp_path):
    checkpoint = tf.train.Checkpoint(variable=tf.Variable(3.0))
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path), 1)
    for _ in range(2):
        manager.save()
    assert files(tmp_path) == ["checkpoint", "ckpt-2.data-00000-of-00001", "ckpt-2.index"]
