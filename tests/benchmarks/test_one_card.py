"""`python -m benchmarks.one_card` on CPUs, tiny; what it makes of rows that fail, crash and hang; how it reads a trace."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from benchmarks.one_card import cost, exact, memory, overlap, plans, trace
from benchmarks.one_card.__main__ import _SECONDS, parse_args
from benchmarks.one_card.card import Card
from benchmarks.one_card.rows import Part, Row, run_part
from tfdist.tools.doctor.check import Finding, LeftOutError, Result, Status

ROOT = pathlib.Path(__file__).resolve().parents[2]
CARD = Card(is_gpu=False, is_quick=True)


PARTS = {part.__name__.rpartition(".")[2]: part for part in (exact, memory, cost, overlap, plans)}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("parts", [("memory", "overlap"), pytest.param(tuple(PARTS), marks=pytest.mark.exhaustive)], ids=str)
def test_parts_on_cpus(parts, tmp_path):
    output, head, *records = run(tmp_path, "--quick", "--parts", *parts)
    assert head["benchmark"] == "one_card" and head["data"]["tensorflow"]
    assert {record["status"] for record in records} == {"holds"}
    found = {(record["part"], record["name"]): record["data"] for record in records}
    expected = [(part.name, row.name) for part in (PARTS[name].part(CARD) for name in parts) for row in part.rows]
    assert list(found) == expected
    # Stage 3 of two ranks stores half of what stage 0 stores: Adam's moments and the weights.
    rests = [found["memory", name]["rest_bytes"] for name in ("stage 3, prefetch 1", "stage 0")]
    assert rests[0] == pytest.approx(rests[1] / 2, rel=0.02)
    if "cost" in parts:
        assert found["cost", "stage 3"]["baseline"] == "Keras"
    assert found["overlap", "stage 3"]["messages_ms"] > 0 and found["overlap", "stage 3"]["compute_ms"] > 0
    table = (tmp_path / "table.txt").read_text()
    assert table in output and all(name in table for _, name in expected)


def run(folder, *options):
    """Returns what the program prints, and its records."""
    words = [sys.executable, "-m", "benchmarks.one_card", "--device", "cpu", "--out", str(folder), *options]
    ended = subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout, *map(json.loads, (folder / "results.jsonl").read_text().splitlines())


def hang(card):
    time.sleep(600)


def fail(card):
    raise ValueError("a row's error")


def crash(card):
    os.kill(os.getpid(), signal.SIGKILL)


def not_here(card):
    raise LeftOutError("for a reason")


def holds(card):
    return Finding("as it should be", {"process": os.getpid()})


def part_of(rows, shares_process, seconds=100.0):
    return Part("part", rows, shares_process, {}, "", seconds=seconds, row_seconds=2.0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shares_process", [True, False])
def test_what_goes_wrong_is_a_row_and_the_next_goes_on(shares_process):
    runs = (holds, holds, fail, hang, crash, not_here, holds)
    rows = [Row(f"{index} {run.__name__}", run) for index, run in enumerate(runs)]
    found, when = [], []
    card = Card(is_gpu=True, is_quick=False)
    run_part(part_of(rows, shares_process), card, None, lambda result: (found.append(result), when.append(time.monotonic())))
    assert [result.name for result in found] == [row.name for row in rows]
    assert [result.status.value for result in found] == ["holds", "holds", "error", "error", "error", "left out", "holds"]
    assert "a row's error" in found[2].summary and "still running after 2 s" in found[3].summary
    assert "SIGKILL" in found[4].summary and found[5].summary == "for a reason"
    assert when[3] - when[2] > 1.5  # each is told as it ends: the third while the fourth hangs
    processes = {found[index].data["process"] for index in (0, 1, 6)}
    assert len(processes) == (2 if shares_process else 3) and os.getpid() not in processes


def test_rows_that_find_no_time_are_left_out():
    rows = [Row("late", holds), Row("PyTorch", peer=object())]
    found = []
    run_part(part_of(rows, True, seconds=-1.0), CARD, None, found.append)
    run_part(part_of(rows, False), CARD, None, found.append, stop=time.monotonic() - 1)
    assert [(result.status.value, result.summary) for result in found] == [("left out", "no time was left for it")] * 4


def test_the_parts_fit_in_eight_minutes():
    parts = [part(CARD) for part in (exact.part, memory.part, cost.part, overlap.part)]
    # Nothing begins after a part's time; what has begun ends by a limit of its own.
    assert sum(part.seconds for part in parts) <= _SECONDS <= 8 * 60 - 20
    assert [part.name for part in parts] == parse_args([]).parts


def step(name, seconds, loss, policy="float32"):
    return Result(name, Status.HOLDS, "", 0.0, {"step_seconds": seconds, "warmup_loss": loss, "case": {"policy": policy}})


def test_a_row_is_compared_with_its_baseline():
    before = [step("Keras", 0.100, 2.0), step("PyTorch", 0.080, 2.0)]
    found = cost.related(step("stage 3", 0.103, 2.0001), before)
    assert found.status is Status.HOLDS and found.data["overhead"] == pytest.approx(0.03)
    assert cost.related(step("FSDP2", 0.100, 2.0), before).data["baseline"] == "PyTorch"
    wrong = cost.related(step("stage 0", 0.1, 2.1), before)
    assert wrong.status is Status.FAILS and "is not that of Keras" in wrong.summary
    assert cost.related(step("stage 0", 0.1, float("nan")), before).status is Status.FAILS
    assert "overhead" not in cost.related(step("stage 0", 0.1, 2.0), []).data


def space(lines):
    """Returns a trace of a GPU and its host: {(plane, line): [(name, begin, end)]}, in microseconds."""
    found = xplane_pb2.XSpace()
    planes = {}
    for (plane_name, line_name), events in lines.items():
        plane = planes.get(plane_name) or planes.setdefault(plane_name, found.planes.add(name=plane_name))
        line = plane.lines.add(name=line_name, timestamp_ns=5000)
        for name, begin, end in events:
            number = len(plane.event_metadata) + 1
            plane.event_metadata[number].name = name
            line.events.add(metadata_id=number, offset_ps=int(begin * 1e6), duration_ps=int((end - begin) * 1e6))
    return found


def test_a_trace_of_streams():
    figures = trace.read(
        space(
            {
                ("/device:GPU:0", "Stream #1(Compute)"): [("sgemm", 0, 40), ("add", 40, 50), ("sgemm", 70, 100)],
                ("/device:GPU:0", "Stream #2(MemcpyD2D)"): [("MemcpyD2D", 30, 60)],
                ("/device:GPU:0", "TensorFlow Ops"): [("MatMul", 0, 100)],  # the same again, by name
                ("/host:CPU", "tf_Compute/1"): [("a/b:CollectiveReduceV2", 55, 65), ("ExecutorState::Process", 0, 100)],
            }
        )
    ).figures(steps=2)
    assert figures["step_ms"] == pytest.approx(0.05)
    assert figures["compute_ms"] == pytest.approx(0.04)
    assert figures["messages_ms"] == pytest.approx(0.015)
    assert figures["hidden_ms"] == pytest.approx(0.01)
    assert figures["idle_share"] == pytest.approx(0.1)
    assert (figures["gaps_per_step"], figures["longest_gap_us"]) == (0.5, pytest.approx(10))
    assert figures["idle_in_collectives_share"] == pytest.approx(0.5)
    assert list(figures["most_time"]) == ["sgemm", "add"]


def test_a_trace_of_the_host_alone():
    figures = trace.read(
        space(
            {
                ("/host:CPU", "tf_Compute/1"): [("model/dense/MatMul:_MklMatMul", 0, 40), ("ExecutorState::Process", 0, 100)],
                ("/host:CPU", "collective_ops/2"): [("unshard/CollectiveGatherV2:CollectiveGatherV2", 20, 60), ("Loop", 20, 60)],
                ("/host:CPU", "tf_data_private/3"): [("Slice:Slice", 0, 500)],
                ("/host:CPU", "tf_Compute/4"): [("x:Mul", 90, 100)],
            }
        )
    ).figures(steps=1)
    assert (figures["step_ms"], figures["compute_ms"], figures["messages_ms"]) == pytest.approx((0.1, 0.04, 0.04))
    assert figures["hidden_ms"] == pytest.approx(0.02) and figures["idle_share"] == pytest.approx(0.3)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_every_row_of_exactness_on_cpus(tmp_path):
    """What `--quick` leaves out, as a card would run it; CPUs have no TensorFloat-32."""
    _, _, *records = run(tmp_path, "--parts", "exact")
    names = [row.name for row in exact.part(Card(is_gpu=False, is_quick=False)).rows]
    expected = [(name, "left out" if "TensorFloat-32" in name else "holds") for name in names]
    assert [(record["name"], record["status"]) for record in records] == expected
