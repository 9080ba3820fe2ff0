"""The records file: what a run that goes on finds in it, and what it refuses."""

import json

import pytest
from suite_records import measure_of, record_of, speed

from benchmarks import results
from benchmarks.results import BrokenFileError, ConditionsError, Results

CONDITIONS = {"commit": "1a2b3c4", "tensorflow": "2.21.0", "torch": None}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "new" / "results.jsonl"


def key(**environment):
    return results.key_of(measure_of("speed", "small", "zero3", 2), environment)


def test_a_folder_without_records(file):
    found = Results(file, CONDITIONS)
    assert found.all() == []
    assert not found.is_done(key())


def test_records_are_found_again(file):
    record = speed("small", "zero3", 2, 1000.0)
    Results(file, CONDITIONS).append(record)
    found = Results(file, CONDITIONS)
    assert found.is_done(key())
    assert found.all() == [record]
    assert len(file.read_text().splitlines()) == 2  # conditions are not written again


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "memory"},
        {"model": "wide"},
        {"contender": "zero2"},
        {"ranks": 4},
        {"layers": 8},
        {"steps": 10},
        {"round_index": 1},
        {"environment": {"LD_PRELOAD": "lib.so"}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_setting_is_another_measurement(file, other):
    found = Results(file, CONDITIONS)
    found.append(speed("small", "zero3", 2, 1000.0))
    assert found.is_done(key())
    assert not found.is_done(key() | other)


@pytest.mark.parametrize("figures", [{"error": "killed"}, {"missing": "python cannot import torch"}], ids=["failed", "missing"])
def test_what_has_no_figures_is_tried_again(file, figures):
    found = Results(file, CONDITIONS)
    found.append(record_of(measure_of("speed", "small", "zero3", 2), **figures))
    assert not found.is_done(key())
    found.append(speed("small", "zero3", 2, 1000.0))
    again = Results(file, CONDITIONS)
    assert again.is_done(key())
    assert [record.get("error") for record in again.all()] == [None]  # the last one counts


@pytest.mark.parametrize("end", [1, 17, -1], ids=["one character", "some", "all but the line's end"])
def test_a_line_that_was_cut_is_dropped(file, end):
    found = Results(file, CONDITIONS)
    found.append(speed("small", "zero3", 2, 1000.0))
    line = json.dumps(speed("small", "zero3", 2, 1100.0, round_index=1)) + "\n"
    with file.open("a") as stream:
        stream.write(line[:end])
    found = Results(file, CONDITIONS)
    assert [record["round_index"] for record in found.all()] == [0]
    found.append(speed("small", "zero3", 2, 1200.0, round_index=1))
    assert [record["tokens_per_second"] for record in Results(file, CONDITIONS).all()] == [1000.0, 1200.0]


def test_conditions_that_were_cut_are_written_again(file):
    file.parent.mkdir()
    file.write_text('{"conditions": {"comm')
    Results(file, CONDITIONS)
    assert json.loads(file.read_text()) == {"conditions": CONDITIONS}


@pytest.mark.parametrize("line", ["no json", "[]", "{}", '{"kind": "speed"}', "7"])
def test_a_line_that_is_no_record(file, line):
    Results(file, CONDITIONS).append(speed("small", "zero3", 2, 1000.0))
    with file.open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(BrokenFileError, match="line 3"):
        Results(file, CONDITIONS)


@pytest.mark.parametrize("name", ["commit", "tensorflow"])
def test_other_conditions_are_refused(file, name):
    Results(file, CONDITIONS)
    with pytest.raises(ConditionsError, match=rf"{name} {CONDITIONS[name]} \(now other\)"):
        Results(file, CONDITIONS | {name: "other"})


def test_a_peer_may_come_later_and_stay_away_but_not_change(file):
    Results(file, CONDITIONS)
    Results(file, CONDITIONS | {"torch": "2.13.0"})
    Results(file, CONDITIONS)
    with pytest.raises(ConditionsError, match="torch 2.13.0"):
        Results(file, CONDITIONS | {"torch": "2.14.0"})


def test_the_folder_of_a_preloaded_library_is_not_kept():
    assert key(LD_PRELOAD="/home/me/lib/libfast.so")["environment"] == {"LD_PRELOAD": "libfast.so"}


def test_conditions_of_this_machine():
    found = results.conditions({"torch": "2.13.0"})
    assert found["torch"] == "2.13.0"
    assert found["tensorflow"] and found["cpu_count"] >= 1
    json.dumps(found)
