"""A worker is killed, again and again, the launcher starts the job again, and it ends as if nothing had happened."""

import json

import numpy as np
import pytest
from grids import exhaustive

from tests import launched
from tests.extensions.resuming import restart_program
from tests.workers import ROOT


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("batches", "steps"), [exhaustive("3", ["2"]), exhaustive("3,5", ["2", "4"])])
def test_a_killed_worker_changes_nothing(batches, steps, tmp_path, monkeypatch, capsys):
    program = ROOT / "tests" / "extensions" / "resuming" / "restart_program.py"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    options = ["--workers", "2", "--max-restarts", "3", "--cpu"]
    code = launched.run([*options, str(program), str(tmp_path), batches], seconds=250)
    text = "".join(capsys.readouterr())
    assert code == 0, text[-5000:]
    assert text.count("[worker 1] killed") == 1 + len(steps)
    goes_on = f"tfdist: training goes on from the backup in {tmp_path}/backup: epoch 2, step "
    assert [line.partition(goes_on)[2] for line in text.splitlines() if goes_on in line] == steps
    assert text.count("this `fit` has ended before the restart, and is passed by") == 2
    curves = json.loads((tmp_path / "curves.json").read_text())
    # Of the first `fit` what it returned in the attempt that ended it: from the epoch that it went on in.
    (epochs, first), second = curves["curves"]
    (_, expected_first), expected_second = curves["expected"]
    assert epochs == list(range(1, restart_program.EPOCHS))
    assert first == {name: values[1:] for name, values in expected_first.items()}
    assert second == expected_second
    with np.load(tmp_path / "found.npz") as found, np.load(tmp_path / "expected.npz") as expected:
        assert len(found.files) == len(expected.files)
        for name in found.files:
            np.testing.assert_array_equal(found[name], expected[name])
    assert not (tmp_path / "backup").exists()  # removed at the end, by the launcher
