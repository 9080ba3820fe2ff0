"""The tensor-parallel example end to end, on random text."""

import re

import pytest


@pytest.mark.timeout(150)
def test_three_ways_agree_and_the_plain_model_loads_the_weights(run_on_random_text, tmp_path):
    flags = "--devices 2 --steps-per-epoch 5 --width 12 --heads 2 --layers 1 --seq-len 7 --batch-size 4 --learning-rate 0.02"
    output = run_on_random_text("train_tensor_parallel", flags)

    assert "mesh: 1 data x 2 tensor ranks, ZeRO stage 2" in output
    (off,) = re.findall(r"^off by at most +- +(\S+) +(\S+)$", output, re.MULTILINE)
    assert all(float(number) < 1e-5 for number in off)
    steps = [[float(number) for number in line.split()[1:]] for line in re.findall(r"^[15] +\d+\.\d.*", output, re.MULTILINE)]
    assert len(steps) == 2 and all(len(losses) == 3 for losses in steps)
    assert steps[1][0] < steps[0][0] - 0.1
    assert re.search(r"^block_0_mlp_in +column +624 +312 +sharded$", output, re.MULTILINE)  # (12 + 1) * 48, whole and sharded
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
def test_bad_flags_are_named(refused_flags, flags, message):
    assert message in refused_flags("train_tensor_parallel", flags)
