"""The examples as jobs of several workers, through the launcher."""

import os
import re

import pytest

from tests import launched, workers
from tests.examples.program import EXAMPLES, SMALL_LIBRARY
from tests.workers import ROOT

SMALL = ["--epochs", "2", "--steps-per-epoch", "3", "--width", "16", "--layers", "1", "--heads", "2", "--seq-len", "16"]
SMALL += ["--batch-size", "8"]
ALONE = ["--devices", "1", "--zero-stage", "0"]


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """Runs a script in as many workers, which begin as a user's do, under a launcher in this process; returns their output."""

    def run(number, *script):
        code = launched.run(["--workers", str(number), "--cpu", *script], seconds=200)
        captured = capsys.readouterr()
        assert code == 0, captured.out[-4000:] + captured.err[-4000:]
        return captured.out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SMALL_LIBRARY), str(ROOT)]))
    return run


def losses(output):
    return [float(found) for found in re.findall(r"validation loss (\d+\.\d+)", output)]


def assert_trained_as(alone, several, folder):
    """Both are what an example says; `several` that of two workers, which left their files in `folder`."""
    assert "of 2 workers, ZeRO stage 3" in several
    assert "worker 1 CPU:0" in several, "the memory report lists all devices"
    assert len(losses(several)) == len(losses(alone)) == 3  # before training, and after each epoch
    assert losses(several) == pytest.approx(losses(alone), abs=2e-4)
    assert "loaded without a strategy: equal" in several
    assert (folder / "loss.png").exists() and not (folder / "backup").exists()


@pytest.mark.timeout(250)
def test_train_gpt_ends_with_the_loss_of_one_device(run_on_random_text, tmp_path):
    several = tmp_path / "several"
    flags = [*SMALL, "--out", str(several)]
    with workers.job(tmp_path, 2, "tests.examples.program:run", "train_gpt", flags, True) as job:
        alone = run_on_random_text("train_gpt", " ".join([*SMALL, *ALONE]))
        job.results(200)
    assert_trained_as(alone, job.workers[0].output, several)


@pytest.mark.exhaustive
@pytest.mark.timeout(450)
def test_train_gpt_through_the_launcher(prepared, records, launch, run_example, tmp_path):
    """Its workers prepare the data set, which is the same each time."""
    several = launch(2, os.path.join(EXAMPLES, "train_gpt.py"), *SMALL, "--out", "several")
    assert records(tmp_path / "several" / "data") == records(prepared)
    (tmp_path / "data").symlink_to(prepared)
    alone = run_example("train_gpt", *SMALL, *ALONE)
    assert_trained_as(alone, several, tmp_path / "several")


@pytest.mark.timeout(250)
def test_each_worker_reads_its_own_part(prepared, tmp_path):
    (tmp_path / "data").symlink_to(prepared)
    flags = ["--documents", "9", "--width", "16", "--batch-size", "16", "--out", str(tmp_path)]
    with workers.job(tmp_path, 2, "tests.examples.program:run", "split_input", flags) as job:
        job.results(200)
    for index, worker in enumerate(job.workers):
        assert f"worker {index} of 2 reads" in worker.output
    assert re.search(r"loss \d+\.\d+ after \d+ steps", job.workers[0].output)
