"""The command line of the suite, going on with a run, and what it shows. No case is run."""

import json
import pathlib
import subprocess
import sys

import pytest
from suite_records import memory, scaling, speed

from benchmarks import cases, figures, plots, promises, run, summary
from benchmarks.job import JobError
from benchmarks.results import Results
from benchmarks.run import keyed, parse_args, run_all

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 7", "argument --steps: must be at least 8, for a median. Received: 7"),
        ("--ranks 3", "divide the 16 examples of small. Received: 3"),
        ("--ranks 1", "must be above 1"),
        ("--contenders zero1 zero1", "argument --contenders: each at most once. Received: zero1 zero1"),
        ("--contenders zero9", "invalid choice: 'zero9'"),
        ("--suite medium", "invalid choice: 'medium'"),
        ("--kinds scaling", "nothing to measure: scaling is of narrow"),
        ("--kinds speed --models narrow", "nothing to measure"),
        ("--kinds memory --contenders local-zero2", "nothing to measure"),
        ("--rounds 0", "must be an integer of at least 1. Received: 0"),
        ("--torch-python no/such/python", "argument --torch-python: must be a program. Received: no/such/python"),
        ("--torch-preload no/such.so", "argument --torch-preload: must be a file. Received: no/such.so"),
        ("--timeout-seconds nan", "Received: nan"),
    ],
)
def test_mistakes_on_the_command_line(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_args(words.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_out_must_be_a_folder(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        parse_args(["--out", str(tmp_path / "file")])
    assert "argument --out: must be a folder" in capsys.readouterr().err


def test_flags_replace_what_the_suite_has():
    args = parse_args("--suite full --kinds speed --models wide --ranks 4 --contenders zero3 fsdp2 --rounds 2 --steps 9".split())
    assert {(x.kind, x.model, x.ranks, x.steps) for x in args.measures} == {("speed", "wide", 4, 9)}
    assert [x.contender for x in args.measures] == ["fsdp2", "zero3", "zero3", "fsdp2"]
    assert parse_args([]).measures == parse_args(["--suite", "quick"]).measures


def test_tensorflow_is_not_imported():
    program = "import sys, benchmarks.run; sys.exit('tensorflow' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


# Going on


class Ran(list):
    """Stands for the running of cases: notes them, and fails or stops where it is told to."""

    def __init__(self, monkeypatch, failing=(), stop_at=None):
        super().__init__()
        self._failing, self._stop_at = failing, stop_at
        monkeypatch.setattr(run, "run_case", self._run)

    def _run(self, args, measure):
        if len(self) == self._stop_at:
            raise KeyboardInterrupt
        self.append((measure.contender, measure.round_index))
        if measure.contender in self._failing:
            raise JobError("it died")
        return {"tokens_per_second": 100.0, "cpu_seconds_per_step": 0.1, "warmup_losses": [1.0]}


def arguments(tmp_path, words=""):
    return parse_args(f"--contenders zero1 fsdp2 zero3 --models small --out {tmp_path} {words}".split())


def go(args, reasons=None):
    found = Results(args.out / run.FILE, {"commit": "1a2b3c4"})
    run_all(args, found, reasons or {})
    return found


def test_a_run_that_is_done_runs_nothing(tmp_path, monkeypatch, capsys):
    args = arguments(tmp_path)
    first = Ran(monkeypatch)
    go(args)
    assert len(first) == 6
    second = Ran(monkeypatch)
    go(args)
    assert second == []
    assert "6 of 6 measured before" in capsys.readouterr().err


def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    first = Ran(monkeypatch, stop_at=4)
    with pytest.raises(KeyboardInterrupt):
        go(args)
    second = Ran(monkeypatch)
    go(args)
    assert len(first) == 4 and len(second) == 2
    assert set(first) | set(second) == {(x.contender, x.round_index) for x in args.measures}


def test_more_rounds_are_added(tmp_path, monkeypatch):
    Ran(monkeypatch)
    go(arguments(tmp_path))
    second = Ran(monkeypatch)
    go(arguments(tmp_path, "--rounds 3"))
    assert {number for _, number in second} == {2}


def test_other_steps_are_measured_anew(tmp_path, monkeypatch):
    Ran(monkeypatch)
    go(arguments(tmp_path))
    second = Ran(monkeypatch)
    go(arguments(tmp_path, "--steps 9"))
    assert len(second) == 6


def test_failures_are_recorded_and_tried_again(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    Ran(monkeypatch, failing=["fsdp2"])
    assert [x["contender"] for x in go(args).all() if x.get("error") == "it died"] == ["fsdp2", "fsdp2"]
    second = Ran(monkeypatch)
    go(args)
    assert {contender for contender, _ in second} == {"fsdp2"}


def test_other_losses_are_a_failure(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    losses = iter([1.0, 1.0, 1.1, 1.0, 1.0, 1.0])
    Ran(monkeypatch)
    monkeypatch.setattr(run, "run_case", lambda args, measure: {"tokens_per_second": 1.0, "warmup_losses": [next(losses)]})
    assert [x["contender"] for x in go(args).all() if "not the same work" in x.get("error", "")] == ["zero3"]


def test_missing_peers_are_recorded_once_and_not_run(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    ran = Ran(monkeypatch)
    for _ in range(2):
        found = go(args, {"torch": "python cannot import torch"})
    assert {contender for contender, _ in ran} == {"zero1", "zero3"}
    assert [x["missing"] for x in found.all() if x["contender"] == "fsdp2"] == ["python cannot import torch"] * 2
    lines = [json.loads(line) for line in (tmp_path / run.FILE).read_text().splitlines()]
    assert sum("missing" in line for line in lines) == 2
    later = Ran(monkeypatch)
    go(args)
    assert {contender for contender, _ in later} == {"fsdp2"}


def test_a_folder_of_other_conditions(tmp_path, monkeypatch, capsys):
    Ran(monkeypatch)
    go(arguments(tmp_path))
    words = ["--contenders", "zero1", "--models", "small", "--out", str(tmp_path)]
    assert run.main(words) == 2
    assert "commit 1a2b3c4" in (message := capsys.readouterr().err) and "--fresh" in message
    monkeypatch.setattr(run, "report", lambda args, found: 0)
    assert run.main([*words, "--fresh"]) == 0
    assert (tmp_path / "results.old.jsonl").exists()


# What is shown


RECORDS = [
    speed("small", "single", 1, 100.0),
    speed("small", "mw-mirrored", 2, 50.0),
    speed("small", "mw-mirrored", 2, 60.0, 1),
    speed("small", "zero3", 2, 75.0),
    speed("small", "zero3", 2, 60.0, 1),
    speed("small", "fsdp2", 2, 50.0, missing="python cannot import torch"),
    speed("small", "zero1", 2, 50.0, error="died"),
    memory("small", "zero3", 2, 10e6),
    *(scaling("mirrored", layers, build=layers / 4, per_parameter=1e-8) for layers in (4, 8, 16, 32)),
]


def test_the_table():
    text = summary.tables(figures.Figures(RECORDS))
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith(("single", "zero", "mw-", "fsdp2"))}
    assert rows["zero3"][:7] == ["zero3", "x2", "68", "2", "1.25", "1.00", ".."]
    assert rows["zero3"][-2:] == ["10", "1.25"]
    assert rows["zero1"][-1] == "failed" and rows["fsdp2"][-1] == "missing"
    assert "missing: speed small fsdp2 x2: python cannot import torch" in text
    assert "failed: speed small zero1 x2: died" in text
    assert "narrow, 4 logical CPUs" in text


def test_pictures(tmp_path):
    files = plots.draw_all(figures.Figures(RECORDS), tmp_path)
    assert [file.name for file in files] == ["speed_small.png", "memory_small.png", "scaling.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_nothing_to_draw(tmp_path):
    assert plots.draw_all(figures.Figures([]), tmp_path) == []


@pytest.mark.parametrize(("speed_of_zero3", "check", "code"), [(2.0, True, 0), (0.5, True, 1), (0.5, False, 0)])
def test_check_is_of_what_was_asked_for(speed_of_zero3, check, code, tmp_path, monkeypatch, capsys):
    args = parse_args(f"--contenders zero3 fsdp2 --models small --rounds 1 --out {tmp_path} {'--check' * check}".split())
    found = Results(tmp_path / run.FILE, {})
    for measure, key in keyed(args):
        value = speed_of_zero3 if measure.contender == "zero3" else 1.0
        found.append({**key, "case": measure.label, "tokens_per_second": value, "warmup_losses": [1.0]})
    assert run.report(args, found) == code
    assert "small, zero3 x2: speed over fsdp2's" in capsys.readouterr().out
    assert (tmp_path / "table.txt").exists()


def test_check_fails_for_what_was_asked_for_and_is_missing(tmp_path):
    args = parse_args(f"--contenders zero3 fsdp2 --models small --rounds 1 --out {tmp_path} --check".split())
    found = Results(tmp_path / run.FILE, {})
    assert run.report(args, found) == 1
    asked = [x for x in promises.promises(figures.Figures([])) if x.is_asked_of(args.measures)]
    assert cases.exit_code([promise.target for promise in asked], failures=0, check=True) == 1


# Figures of a case


def test_the_slowest_rank_counts():
    measure = arguments(pathlib.Path("unused")).measures[0]
    ready = [{"parameters": 100, "build_seconds": x, "first_step_seconds": 2 * x, "warmup_loss": 1.0} for x in (1.0, 3.0)]
    answers = [{"step_seconds": seconds, "cpu_seconds": 0.25, "loss": 0.5} for seconds in ([1.0, 9.0, 1.0], [2.0, 2.0, 2.0])]
    found = run.step_fields(measure, ready, answers)
    assert found["step_seconds"] == 2.0
    assert found["tokens_per_second"] == 16 * 128 / 2.0
    assert found["step_seconds_per_parameter"] == 0.02
    assert found["cpu_seconds_per_step"] == 0.5
    assert found["build_and_trace_seconds"] == 9.0


def test_the_rank_that_grows_most_counts():
    (measure,) = parse_args("--kinds memory --models small --ranks 4 --contenders zero3".split()).measures
    answers = [
        {
            "parameters": 1000,
            "imported_rss_bytes": imported,
            "peak_rss_bytes": peak,
            "phase_peak_rss_bytes": {"build": imported + 1, "steps": peak},
            "has_high_water_mark": True,
            "warmup_loss": 1.0,
            "loss": 0.5,
        }
        for imported, peak in [(50_000, 54_000), (40_000, 46_000), (60_000, 60_500), (1, 2)]
    ]
    found = run.memory_fields(measure, answers)
    assert found["growth_bytes_by_rank"] == [4000, 6000, 500, 1]
    assert found["growth_bytes"] == 6000
    assert found["floor_bytes"] == 16 / 4 * 1000
    assert found["growth_over_floor"] == 1.5
    assert found["phase_growth_bytes"] == {"build": 1, "steps": 6000}
