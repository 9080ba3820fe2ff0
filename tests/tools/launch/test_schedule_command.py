"""`python -m tfdist schedule`."""

import functools
import sys

import pytest

from tfdist.tools.launch import cli
from tfdist.tools.launch.schedule_command import add_schedule

main = functools.partial(cli.main, more=[add_schedule])

GRID = "# mine\n0F0 0F1   .   . 0B0 0B1\n  . 1F0 1F1 1B0 1B1   .\n"


def failed(capsys, *args):
    with pytest.raises(SystemExit) as error:
        main(["schedule", *args])
    assert error.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.partition("python -m tfdist schedule: error: ")[2]


def test_what_it_prints(capsys):
    assert main("schedule --schedule 1f1b --stages 2 --microbatches 3".split()) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1f1b: 2 stages on 2 ranks, 3 microbatches",
        "rank 0  0F0 0F1  .  0B0 0F2 0B1  .  0B2",
        "rank 1   .  1F0 1B0 1F1 1B1 1F2 1B2  .",
        "bubble fraction: 0.3333 (idle / busy time, with durations F 1, B 2, I 1, W 1)",
        "peak in flight:  2, 1 (activations held on each rank, in microbatches of one stage)",
    ]


def test_several_stages_on_a_rank(capsys):
    assert main("schedule --schedule Interleaved --stages 4 --microbatches 4 --stages-per-rank 2".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "interleaved: 4 stages on 2 ranks, 4 microbatches"
    assert lines[-3].startswith("bubble fraction: 0.125 ")
    assert lines[-2].startswith("peak in flight:  5, 3 ")
    assert lines[-1] == "                 2.5, 1.5 (in microbatches of all stages of the rank)"


def test_a_file(tmp_path, capsys):
    path = tmp_path / "my schedule.txt"
    path.write_text(GRID, "utf-8")
    assert main(["schedule", "--file", str(path)]) == 0
    assert capsys.readouterr().out.startswith("my schedule: 2 stages on 2 ranks, 2 microbatches\nrank 0  0F0 0F1")
    assert main(["schedule", "--file", str(path), "--stages", "2", "--microbatches", "2", "--stages-per-rank", "1"]) == 0
    capsys.readouterr()
    assert "`schedule` must have `num_stages`=4, but has 2" in failed(capsys, "--file", str(path), "--stages", "4")


def test_a_picture(tmp_path, capsys):
    png = tmp_path / "schedule.png"
    assert main(["schedule", *"--schedule gpipe --stages 2 --microbatches 2 --png".split(), str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.startswith("gpipe: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "one of the arguments --schedule --file is required"),
        ("--schedule gpipe --file x", "argument --file: not allowed with argument --schedule"),
        ("--schedule 1f1b --stages 4", "argument --schedule: needs --stages and --microbatches"),
        ("--schedule 1f1b --stages four --microbatches 8", "argument --stages: invalid int value: 'four'"),
        ("--schedule 1f1b --stages 0 --microbatches 8", "`num_stages` must be a positive integer. Received: num_stages=0"),
        ("--schedule 2f2b --stages 4 --microbatches 8", "`schedule` must be one of 'gpipe', '1f1b', 'interleaved', 'zero_bu"),
        ("--schedule interleaved --stages 4 --microbatches 8", "`stages_per_rank` of `ScheduleInterleaved1F1B` must be at least"),
        ("--schedule gpipe --stages 5 --microbatches 8 --stages-per-rank 2", "`num_stages` must be a multiple of `stages_per_ra"),
        ("--file /nowhere/schedule.txt", "[Errno 2] No such file or directory: '/nowhere/schedule.txt'"),
        ("--schedule gpipe --stages 2 --microbatches 2 --png /nowhere/x.png", "[Errno 2] No such file or directory: '/nowhere"),
        ("--schedule gpipe --stages 2 --microbatches 2 --png x.abc", "Format 'abc' is not supported"),
    ],
)
def test_wrong_arguments(options, message, capsys):
    assert failed(capsys, *options.split()).startswith(message)


def test_a_schedule_that_cannot_run(tmp_path, capsys):
    path = tmp_path / "circle.txt"
    path.write_text("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1\n", "utf-8")
    text = failed(capsys, "--file", str(path))
    assert text.startswith("`schedule` must not let ranks wait for each other in a circle: 0B0 (rank 0) waits for 1B0, which")
    assert "rank 1  >1F1<  1F0   1B0   1B1" in text


def test_matplotlib_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = failed(capsys, *"--schedule gpipe --stages 2 --microbatches 2 --png".split(), str(tmp_path / "x.png"))
    assert text.startswith("`draw` needs matplotlib, which is not installed. pip install 'tfdist[examples]'")


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["schedule", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "python -m tfdist schedule --schedule 1f1b --stages 4 --microbatches 8" in text
    assert all(f"\n  {option}" in text for option in "--schedule --file --stages --microbatches --stages-per-rank --png".split())
