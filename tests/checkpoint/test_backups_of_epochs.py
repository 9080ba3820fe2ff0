"""Without the extension that goes on in the middle of an epoch: backups are of the ends of epochs, and nothing is silent."""

import json

import keras
import pytest

from tests.checkpoint.failing_fits import EPOCHS, Fail, Failed, arrays, program, train
from tfdist.checkpoint import BACKUP, FitBackup

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300)]


class OfMiddle(FitBackup):
    """Writes backups that say of themselves what those of the middle of an epoch say."""

    def _write(self, path, more, **arrays):
        return super()._write(path, {**more, "batch": 2, "position": {}}, **arrays)


def fit(callbacks, epochs=EPOCHS):
    made = program()
    return made.model.fit(**arrays()(), epochs=epochs, verbose=0, callbacks=callbacks)


def test_backups_are_of_the_ends_of_epochs(monkeypatch, tmp_path):
    """It is warned once, and a restart begins with the first batch of the epoch that failed."""
    monkeypatch.setattr(BACKUP, "now", FitBackup)
    backup = keras.callbacks.BackupAndRestore(tmp_path, save_freq=2, delete_checkpoint=False)
    program().restart()
    words = "saves at the end of each epoch only: `tfdist.extensions.resuming`, which .* is not installed"
    with pytest.raises(Failed), pytest.warns(UserWarning, match=words) as told:
        fit([backup, Fail(1, 3)])
    assert len([each for each in told if "BackupAndRestore" in str(each.message)]) == 1
    assert json.loads((tmp_path / "training_metadata.json").read_text()) == {"epoch": 1, "batch": 0}
    begun = []
    noted = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: begun.append(batch))
    assert train(program(), arrays(), [backup, noted]).epoch == [1, 2]
    assert begun == [*range(5)] * 2
    assert int(program().model.optimizer.iterations) == 5 * EPOCHS


def test_a_backup_of_the_middle_of_an_epoch_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(BACKUP, "now", OfMiddle)
    assert train(program(), arrays(), [keras.callbacks.BackupAndRestore(tmp_path)], (1, 3)) is None
    monkeypatch.setattr(BACKUP, "now", FitBackup)
    program().restart()
    with pytest.raises(RuntimeError, match="of the middle of an epoch: `tfdist.extensions.resuming`, .* is not installed"):
        fit([keras.callbacks.BackupAndRestore(tmp_path)])
