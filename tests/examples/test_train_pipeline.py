"""The examples of pipelines end to end, on random text."""

import re

import pytest

SMALL = "--steps-per-epoch 4 --width 12 --heads 2 --seq-len 7 --learning-rate 0.02"


def assert_same_curve(output):
    """The losses of all steps are those of one device, and something was learnt."""
    (off,) = re.findall(r"^off by at most +- +(\S+)$", output, re.MULTILINE)
    assert float(off) < 1e-5
    first, last = (list(map(float, line)) for line in re.findall(r"^[14] +(\d+\.\d+) +(\d+\.\d+)$", output, re.MULTILINE))
    assert last[0] < first[0] - 0.1
    assert output.count("loaded without a strategy: equal") == 1


def shares(output):
    """Returns the percentages of the memory report, without its last row."""
    return [float(share) for share in re.findall(r"^CPU:\d .* ([\d.]+)%$", output, re.MULTILINE)]


@pytest.mark.exhaustive
@pytest.mark.timeout(150)
def test_four_stages_train_as_one_device(run_on_random_text, tmp_path):
    output = run_on_random_text("train_pipeline", f"{SMALL} --layers 1 --batch-size 4 --microbatches 4")
    assert "mesh: 1 data x 4 pipe x 1 tensor ranks" in output
    assert "Largest stage / mean: " in output  # the report of the stages
    assert "  .   .   . 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3   .   .   ." in output
    assert "idle / busy time: 75.0%; microbatches whose activations each rank holds: 4, 3, 2, 1" in output
    assert_same_curve(output)
    assert len(shares(output)) == 4 and sum(shares(output)) == pytest.approx(100, abs=0.5)  # each weight is on one device
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "gpt.weights.h5").stat().st_size > 0


@pytest.mark.timeout(200)
def test_data_pipe_and_tensor_ranks_train_as_one_device(run_on_random_text):
    output = run_on_random_text("train_3d", f"{SMALL} --layers 1 --batch-size 4 --microbatches 2")
    assert "mesh: 2 data x 2 pipe x 2 tensor ranks" in output
    assert_same_curve(output)
    assert len(shares(output)) == 8 and max(shares(output)) < 35


@pytest.mark.parametrize(
    "name, flags, message",
    [
        ("train_pipeline", "--devices 4 --pipeline-parallel-size 3", "--devices: 4 must be divisible by 3"),
        ("train_pipeline", "--batch-size 12", "--batch-size: 12 must be divisible by 8: --microbatches 8 of 1 data ranks"),
        ("train_pipeline", "--microbatches 0", "--microbatches: must be positive. Received: 0"),
        ("train_pipeline", "--schedule fastest", "--schedule: invalid choice: 'fastest'"),
        ("train_3d", "--devices 6", "--devices: 6 must be divisible by 4, the ranks of a replica"),
        ("train_3d", "--heads 3 --width 12", "--heads: 3 must be divisible by --tensor-parallel-size 2"),
        ("train_3d", "--batch-size 12", "--batch-size: 12 must be divisible by 8: --microbatches 4 of 2 data ranks"),
    ],
)
def test_bad_flags_are_named(refused_flags, name, flags, message):
    assert message in refused_flags(name, flags)
