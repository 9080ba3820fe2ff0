"""The example end to end, and its data set. Both run in processes of their own: they split the CPU their own way."""

import importlib
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run_python(*args):
    """Runs Python with tfdist and the examples importable; returns the finished process."""
    path = os.pathsep.join([str(EXAMPLES), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *args],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.timeout(300)
def test_trains_sharded_and_restores_without_a_strategy(prepared, run_example, tmp_path):
    (tmp_path / "data").symlink_to(prepared)
    flags = "--devices 2 --zero-stage 3 --epochs 1 --steps-per-epoch 6 --width 15 --heads 3 --layers 1 --seq-len 33"
    output = run_example("train_gpt", *flags.split(), "--batch-size", "6", "--learning-rate", "0.02")

    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "gpt.weights.h5").stat().st_size > 0
    before, after = (float(loss) for loss in re.findall(r": validation loss ([\d.]+), perplexity", output))
    assert after < before - 0.5  # from uniform over 256 bytes towards their frequencies
    (line,) = (line for line in output.splitlines() if "without a strategy" in line)
    sharded, plain = (float(loss) for loss in re.findall(r"\d+\.\d+", line))
    assert line.endswith(": equal")
    assert sharded == pytest.approx(plain, rel=1e-5)
    assert sharded == pytest.approx(after, abs=1e-4)
    assert "mirrored" in output  # the memory report
    assert "tokens/s" in output
    assert "The class " in output  # the sample


@pytest.fixture
def train_gpt(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_gpt")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--batch-size 5 --devices 2", "--batch-size: 5 must be divisible by --devices 2"),
        ("--width 10 --heads 4", "--width: 10 must be divisible by --heads 4"),
        ("--logical-gpus 2 --devices 4", "--logical-gpus: must be at least --devices 4. Received: 2"),
        ("--epochs 0", "--epochs: must be positive. Received: 0"),
        ("--zero-stage 4", "--zero-stage: invalid choice: 4"),
    ],
)
def test_bad_flags_are_named(train_gpt, capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        train_gpt.parse_args(flags.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_batches_predict_the_next_token_and_follow_the_seed(train_gpt):
    tokens = np.arange(200, dtype=np.uint8)

    def batches(seed):
        train, validation = train_gpt.make_datasets(tokens, tokens[:80], seq_len=7, batch_size=4, seed=seed)
        return list(train.take(9).as_numpy_iterator()), list(validation.as_numpy_iterator())

    train, validation = batches(1)
    for inputs, targets in train + validation:
        assert inputs.shape == targets.shape == (4, 7)
        np.testing.assert_array_equal(inputs + 1, targets)
    assert len(validation) == 2  # 11 windows: the last 3 make no batch
    np.testing.assert_array_equal(train, batches(1)[0])
    assert not np.array_equal(train, batches(2)[0])


def test_text_too_short_for_a_batch_is_refused(train_gpt):
    with pytest.raises(ValueError, match="--batch-size 4 windows of --seq-len 7. Received: 20 tokens, which make 2"):
        train_gpt.make_datasets(np.zeros(20, np.uint8), np.zeros(200, np.uint8), seq_len=7, batch_size=4, seed=0)


def test_splits_of_the_library_are_disjoint(stdlib_text):
    """Of the whole library; the data set of the other tests is of a small one."""
    texts = {True: [], False: []}
    for source, text in stdlib_text.collect():
        assert text.strip() and source
        texts[stdlib_text.is_validation(text)].append(text)
    train, validation = set(texts[False]), set(texts[True])
    assert len(train) == len(texts[False]) and len(validation) == len(texts[True])
    assert not train & validation
    assert 0.02 < len(validation) / len(train) < 0.1  # one in twenty
    paragraphs = [{p for text in split for p in text.split("\n\n") if len(p) > 200} for split in (train, validation)]
    assert paragraphs[1] and not paragraphs[0] & paragraphs[1]


def test_the_data_set_has_all_texts_in_their_split(prepared, records, stdlib_text):
    """It is the same each time it is prepared: see tests/examples/test_workers.py."""
    found = records(prepared)
    small_library = pathlib.Path(sysconfig.get_paths()["stdlib"]) / "email"
    expected = {"train": [], "validation": []}
    for source, text in stdlib_text.collect(small_library):
        expected["validation" if stdlib_text.is_validation(text) else "train"].append([source, text])
    assert {split: sorted(texts) for split, texts in found.items()} == {split: sorted(texts) for split, texts in expected.items()}


CHECK_SMALL_LIBRARY = """
import pathlib, sys
import stdlib_text

stdlib_text.help_topics = lambda: ()
(pathlib.Path(sys.argv[1]) / "module.py").write_text("'''A docstring that is long enough to be a record of its own.'''")
stdlib_text.collect(sys.argv[1])
"""


def test_a_python_without_documentation_is_refused(tmp_path):
    result = run_python("-c", CHECK_SMALL_LIBRARY, str(tmp_path))
    assert result.returncode != 0
    assert "RuntimeError: `stdlib_text` needs at least 200,000 characters" in result.stderr
    assert "in 1 texts" in result.stderr
