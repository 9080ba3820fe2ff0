"""The tensor-parallel example end to end, on random text, in a process of its own: it splits the CPU its own way."""

import os
import pathlib
import re
import runpy

import pytest

from tests import forks

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

PROGRAM = """
import sys

sys.path.insert(0, {examples!r})  # a fork's path is that of its parent

import numpy as np

import train_gpt
import train_tensor_parallel

text = np.random.default_rng(0).choice(np.frombuffer(b"tensor ", np.uint8), 2000)
train_gpt.load_tokens = lambda dataset, data_dir: (text[:1500], text[1500:])
train_tensor_parallel.main({argv!r})
"""


@pytest.mark.timeout(150)
def test_three_ways_agree_and_the_plain_model_loads_the_weights(tmp_path):
    flags = "--devices 2 --steps-per-epoch 5 --width 12 --heads 2 --layers 1 --seq-len 7 --batch-size 4 --learning-rate 0.02"
    argv = [*flags.split(), "--out", str(tmp_path)]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(examples=str(EXAMPLES), argv=argv), "utf-8")
    files = {"output": tmp_path / "output.txt", "errors": tmp_path / "errors.txt"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = forks.start(runpy.run_path, str(program), None, "__main__", environment=environment, folder=tmp_path, **files)
    try:
        code = process.wait(120)
    finally:
        process.kill()
    output = files["output"].read_text("utf-8")
    assert code == 0, output + files["errors"].read_text("utf-8")

    assert "mesh: 1 data x 2 tensor ranks, ZeRO stage 2" in output
    (off,) = re.findall(r"^off by at most +- +(\S+) +(\S+)$", output, re.MULTILINE)
    assert all(float(number) < 1e-5 for number in off)
    steps = [[float(number) for number in line.split()[1:]] for line in re.findall(r"^[15] +\d+\.\d.*", output, re.MULTILINE)]
    assert len(steps) == 2 and all(len(losses) == 3 for losses in steps)
    assert steps[1][0] < steps[0][0] - 0.1
    assert re.search(r"^block_0_mlp_in +column +624 +312 +cut$", output, re.MULTILINE)  # (12 + 1) * 48, whole and cut
    assert output.count("of mirrored") == 2
    assert output.count("loaded without a strategy: equal") == 2
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--devices 3", "--devices: 3 must be divisible by --tensor-parallel-size 2"),
        ("--heads 4 --width 16 --devices 8 --tensor-parallel-size 8", "--heads: 4 must be divisible by --tensor-parallel-size 8"),
        ("--batch-size 3", "--batch-size: 3 must be divisible by 2 data ranks"),
        ("--epochs 0", "--epochs: must be positive. Received: 0"),
    ],
)
def test_bad_flags_are_named(monkeypatch, capsys, flags, message):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_tensor_parallel

    with pytest.raises(SystemExit) as stop:
        train_tensor_parallel.parse_args(flags.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
