"""Several `fit` with one backup, and a `fit` that is over: what a restart passes by."""

import keras
import numpy as np
import pytest
from grids import exhaustive

from tests.checkpoint.failing_fits import (
    BATCH,
    ROWS,
    Fail,
    Failed,
    X,
    Y,
    arrays,
    assert_goes_on,
    assert_same,
    dataset,
    processes,
    program,
    rows,
    train,
)

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300)]

SHUFFLED = dataset(lambda data: data.shuffle(ROWS).batch(BATCH))


@pytest.fixture
def process(monkeypatch):
    with processes(monkeypatch) as begin:
        yield begin


def trained_twice(made, folder, fails_in_second=None):
    """A program with two `fit` and one callback; returns (epochs, curve, values) of each."""
    backup = keras.callbacks.BackupAndRestore(folder)
    first = train(made, SHUFFLED, [backup])
    found = [(first.epoch, first.history, made.values(), np.random.random())]
    own = [] if fails_in_second is None else [Fail(*fails_in_second)]
    second = made.model.fit(rows().batch(BATCH), epochs=2, verbose=0, callbacks=[backup, *own])
    return [*found, (second.epoch, second.history, made.values(), np.random.random())]


def assert_same_fits(found, expected):
    for (epochs, curve, values, drawn), (own_epochs, own_curve, own_values, own_drawn) in zip(found, expected, strict=True):
        assert (epochs, curve, drawn) == (own_epochs, own_curve, own_drawn)
        assert_same(values, own_values)


def test_a_restart_passes_by_what_is_over(process, tmp_path, capsys):
    made, folder = program(), tmp_path / "backup"
    process("")
    expected = trained_twice(made, folder)
    assert not folder.exists(), "of a process of which nothing is known nothing stays"
    process("a")
    with pytest.raises(Failed):
        trained_twice(made, folder, (1, 2))
    process("a")
    found = trained_twice(made, folder)
    assert_same_fits(found[:1], expected[:1])
    assert found[1][0] == [1]
    assert_same(found[1][2], expected[1][2])
    assert sorted(path.name for path in folder.iterdir()) == ["finished-0.weights.h5", "finished-1.weights.h5"]
    before = made.model.optimizer.iterations.numpy()
    process("a")
    assert_same_fits(trained_twice(made, folder), found)
    assert made.model.optimizer.iterations.numpy() == before
    assert capsys.readouterr().out.count("has ended before the restart, and is passed by: its weights are those of") == 3
    # On purpose, it is another job.
    process("b")
    assert_same_fits(trained_twice(made, folder), expected)
    assert "had the end of an earlier run, not of this job: this run trains" in capsys.readouterr().out
    process("")
    assert_same_fits(trained_twice(made, folder), expected)
    assert not folder.exists()


@pytest.mark.parametrize("jobs", [("a", "b"), exhaustive(("", ""))], ids=str)
def test_whoever_starts_it_goes_on_with_what_is_not_over(jobs, process, tmp_path, capsys):
    """Whatever the job was: as with Keras. What was over then is passed by, too, with the weights that there are."""
    made, folder = program(), tmp_path / "backup"
    process("")
    expected = trained_twice(made, folder)
    process(jobs[0])
    with pytest.raises(Failed):
        trained_twice(made, folder, (1, 2))
    process(jobs[1])
    found = trained_twice(made, folder)
    assert found[1][0] == [1]
    assert_same(found[1][2], expected[1][2])
    words = "its weights are those of" if jobs[0] else "the weights are those of the backup of a later one"
    assert f"is passed by: {words}" in capsys.readouterr().out


def test_training_that_was_stopped_is_over(process, tmp_path):
    """It was killed between the backup of its last epoch and its end."""
    made = program()

    def callbacks():
        return [keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=10.0, restore_best_weights=True)]

    assert_goes_on(made, arrays(), tmp_path / "backup", [(1, "over")], "epoch", callbacks)


def test_a_later_fit_begins_at_its_own_epoch(tmp_path):
    """Keras keeps the epoch that was restored, and a `fit` behind it leaves out as many."""
    made = program()
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    assert train(made, arrays(), [backup], (2, 2)) is None
    assert train(made, arrays(), [backup]).epoch == [2]
    assert made.model.fit(X, Y, epochs=2, verbose=0).epoch == [0, 1]
