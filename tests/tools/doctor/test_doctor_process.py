"""Checks in a process of their own: what raises, crashes or hangs is told, and the checks behind it run."""

import os
import pathlib
import signal
import time

import pytest

from tfdist.tools.doctor.check import Check, Finding, LeftOutError, Result, Status
from tfdist.tools.doctor.examination import run_checks
from tfdist.tools.doctor.workers import WorkerGoneError, Workers

pytestmark = pytest.mark.timeout(60)


class Alone:
    """A session of one worker."""

    made = "made"


def process_id(session):
    return Finding("ran", {"process": os.getpid(), "session": session.made})


def raises(_):
    raise ValueError("`x` must be y.")


def crashes(_):
    os.write(2, b"the last words\n")
    os.kill(os.getpid(), signal.SIGSEGV)


def ends(_):
    print("the end")
    os._exit(3)


def aborts(_):
    os.write(2, b"F0000 00:00:1795601575.969727   13900 buffer.cc:792] Check failed: it was here\n*** stack\n")
    os.abort()


def hangs(_):
    time.sleep(600)


def is_left_out(_):
    raise LeftOutError("there is one device")


def fails(_):
    return Finding("2 is not 1", holds=False)


def examine(*functions, seconds=20.0, needed=(), workers=None):
    """Returns the outcomes, and asserts that each check was told."""
    checks = [Check(f"part/{function.__name__}", function, function in needed) for function in functions]
    told = []
    outcomes = run_checks(checks, Alone, seconds, workers or Workers(None, 1.0), told.append)
    assert [outcome.name for outcome in outcomes] == [check.name for check in checks]
    lines = "".join(told).splitlines()
    for number, (check, line) in enumerate(zip(checks, filter(lambda line: line.startswith("["), lines), strict=False), 1):
        assert line.startswith(f"[{number:2}/{len(checks)}] {check.name} ... ")
    return [*outcomes, lines] if workers else outcomes


def test_checks_share_a_process_that_is_not_this_one():
    first, left_out, failed, last = examine(process_id, is_left_out, fails, process_id)
    assert first.status is Status.HOLDS and first.chief.data["session"] == "made"
    assert first.chief.data["process"] == last.chief.data["process"] != os.getpid()
    assert (left_out.status, left_out.summary) == (Status.LEFT_OUT, "there is one device")
    assert (failed.status, failed.summary) == (Status.FAILS, "2 is not 1")


def test_what_goes_wrong_is_told_and_the_others_run():
    first, raised, crashed, aborted, ended, last = examine(process_id, raises, crashes, aborts, ends, process_id)
    assert first.status is last.status is Status.HOLDS
    assert first.chief.data["process"] != last.chief.data["process"]
    assert raised.status is crashed.status is ended.status is Status.ERROR
    assert raised.summary.startswith("ValueError: `x` must be y")
    assert any("Traceback" in line for line in raised.chief.log)
    assert crashed.summary.startswith("its process was ended by SIGSEGV; it was at ") and "in crashes" in crashed.summary
    assert "the last words" in crashed.chief.log
    expected = "its process was ended by SIGABRT; its last words: buffer.cc:792] Check failed: it was here; it was at "
    assert aborted.summary.startswith(expected)
    assert ended.summary == "its process ended with exit code 3; its last words: the end"


def test_a_hang_ends_with_the_place_where_it_stood():
    start = time.monotonic()
    hung, last = examine(hangs, process_id, seconds=1.0)
    assert time.monotonic() - start < 30
    assert hung.status is Status.ERROR and last.status is Status.HOLDS
    assert hung.summary.startswith("still running after 1 s (--timeout), and was ended; it was at ")
    assert f"{pathlib.Path(__file__).name}, line" in hung.summary and "in hangs" in hung.summary


def test_nothing_runs_behind_what_is_needed():
    raised, unrun = examine(raises, process_id, needed=[raises])
    assert raised.status is unrun.status is Status.ERROR
    assert unrun.summary == "not run, because part/raises went wrong" and not unrun.chief.data


class Others:
    """Stands for another worker, whose doctor tells what it is given to tell, until it ends."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def gather(self, value, timeout_seconds):
        if not self.answers:
            raise WorkerGoneError("worker 1 has ended")
        status, summary = self.answers.pop(0)
        return [value, Result(value["name"], status, summary, 0.0).to_json()]


HOLDS = (Status.HOLDS, "")


def test_workers_go_on_together_behind_a_check_that_went_wrong_on_one():
    others = Others(HOLDS, (Status.ERROR, "its process was ended by SIGSEGV"), HOLDS, (Status.FAILS, "2 is not 1"), HOLDS)
    *outcomes, lines = examine(*5 * [process_id], workers=others)
    expected = [Status.HOLDS, Status.ERROR, Status.HOLDS, Status.FAILS, Status.HOLDS]
    assert [outcome.status for outcome in outcomes] == expected and not others.answers
    assert outcomes[1].summary == "worker 1: its process was ended by SIGSEGV"
    assert "        part/process_id error: worker 1: its process was ended by SIGSEGV" in lines
    first, second, *rest = (outcome.chief.data["process"] for outcome in outcomes)
    assert first == second != rest[0] and len(set(rest)) == 1, "behind an error processes are new"


def test_a_worker_that_has_gone_is_told():
    first, second, third, lines = examine(process_id, process_id, process_id, workers=Others(HOLDS))
    assert (first.status, second.status, third.status) == (Status.HOLDS, Status.HOLDS, Status.ERROR)
    assert len(second.results) == 1 and len(lines) == 2, "what this worker has found"
    assert third.summary == "not all workers took part: worker 1 has ended"


def test_results_survive_json():
    result = Result("a/b", Status.ERROR, "what", 1.0, {"x": [1, None]}, ("line",))
    assert Result.from_json(result.to_json()) == result
    assert Result.from_json(Result("a", Status.HOLDS, "", 0.0).to_json()) == Result("a", Status.HOLDS, "", 0.0)
