"""The examples as jobs of several workers, through the launcher."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.workers import ROOT

SMALL = ["--epochs", "2", "--steps-per-epoch", "3", "--width", "16", "--layers", "1", "--heads", "2", "--seq-len", "16"]
SMALL += ["--batch-size", "8"]


def run(*command, folder):
    """Runs a program; ends it, and by its signal what it has started, when it takes too long."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the launcher ends its workers
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output[-4000:]
    return output


def launched(workers, *program, folder):
    return run("-m", "tfdist", "run", "--workers", str(workers), "--cpu", *program, folder=folder)


def losses(output):
    return [float(found) for found in re.findall(r"validation loss (\d+\.\d+)", output)]


@pytest.mark.timeout(450)
def test_train_gpt_ends_with_the_loss_of_one_device(prepared, records, run_example, tmp_path):
    """Its workers prepare the data set, which is the same each time."""
    several = launched(2, str(ROOT / "examples" / "train_gpt.py"), *SMALL, "--out", "several", folder=tmp_path)
    assert records(tmp_path / "several" / "data") == records(prepared)
    (tmp_path / "data").symlink_to(prepared)
    alone = run_example("train_gpt", *SMALL, "--devices", "1", "--zero-stage", "0")
    assert "of 2 workers, ZeRO stage 3" in several
    assert "worker 1 CPU:0" in several, "the memory report lists all devices"
    assert len(losses(several)) == len(losses(alone)) == 3  # before training, and after each epoch
    assert losses(several) == pytest.approx(losses(alone), abs=2e-4)
    assert "loaded without a strategy: equal" in several
    assert (tmp_path / "several" / "loss.png").exists() and not (tmp_path / "several" / "backup").exists()


@pytest.mark.timeout(250)
def test_each_worker_reads_its_own_part(prepared, tmp_path):
    (tmp_path / "out" / "split_input").mkdir(parents=True)
    (tmp_path / "out" / "split_input" / "data").symlink_to(prepared)
    program = str(ROOT / "examples" / "split_input.py")
    output = launched(2, program, "--documents", "9", "--width", "16", "--batch-size", "16", folder=tmp_path)
    for worker in range(2):
        assert f"worker {worker} of 2 reads" in output
    assert re.search(r"loss \d+\.\d+ after \d+ steps", output)
