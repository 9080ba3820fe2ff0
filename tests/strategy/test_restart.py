"""A worker is killed, the launcher starts the job again, and it ends as if nothing had happened."""

import json

import numpy as np
import pytest

from tests import launched, training
from tests.strategy import restart_program
from tests.workers import ROOT


@pytest.mark.timeout(300)
def test_a_killed_worker_changes_nothing(tmp_path, monkeypatch, capsys):
    program = ROOT / "tests" / "strategy" / "restart_program.py"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    options = ["--workers", "2", "--max-restarts", "2", "--cpu"]
    code = launched.run([*options, str(program), str(tmp_path), "1"], seconds=250)
    text = "".join(capsys.readouterr())
    assert code == 0, text[-5000:]
    model, losses = restart_program.train(training.one_device())
    assert "restarting, attempt 2 of 3" in text
    found = {int(epoch): loss for epoch, loss in json.loads((tmp_path / "losses.json").read_text()).items()}
    # The second attempt went on from the last backup: whole epochs before the one in which the worker was killed.
    assert list(found) == list(range(restart_program.VICTIM_EPOCH, restart_program.EPOCHS))
    np.testing.assert_allclose(list(found.values()), [losses[epoch] for epoch in found], rtol=1e-5)
    expected = [*model.get_weights(), *(variable.numpy() for variable in model.optimizer.variables)]
    with np.load(tmp_path / "weights.npz") as saved:
        assert len(saved.files) == len(expected)
        for name, reference in zip(saved.files, expected, strict=True):
            scale = max(np.abs(reference).max(initial=0.0), 1e-2)
            np.testing.assert_allclose(saved[name], reference, rtol=0, atol=1e-5 * scale)
    assert not (tmp_path / "backup").exists()  # removed at the end, by the chief
