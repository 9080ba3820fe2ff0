"""`python -m tfdist calibrate`: what it measures on logical CPUs, and what it refuses."""

import functools
import itertools
import os
import types

import pytest
import tensorflow as tf

from tests import forks, workers
from tfdist.tools.doctor import bandwidth, block, calibration, timing
from tfdist.tools.doctor.calibration import calibration_checks, hardware_of
from tfdist.tools.doctor.check import LeftOutError, Outcome, Result, Status
from tfdist.tools.doctor.command import add_calibrate
from tfdist.tools.doctor.session import Session
from tfdist.tools.launch.cli import main
from tfdist.tools.planning.hardware import BUS_FACTORS, Hardware, from_file


@pytest.fixture
def small(monkeypatch):
    small = {"_WIDTHS": (96, 192), "_COPIED_BYTES": 2**21, "_COPIES": 4, "_UPDATED": 2**10, "_FUNCTION_ELEMENTS": 2**17}
    for name, value in small.items():
        monkeypatch.setattr(calibration, name, {"CPU": value})
    monkeypatch.setattr(block, "EXAMPLES", (1, 2, 4))
    monkeypatch.setattr(timing, "_SECONDS", 1e-3)
    monkeypatch.setattr(timing, "_MEASURABLE_SECONDS", 1e-3)
    monkeypatch.setattr(calibration, "_SIZES", (2**10, 2**14))
    monkeypatch.setattr(bandwidth, "_MOST_CALLS", 2)
    monkeypatch.setattr(calibration, "_OVERLAP_BYTES", 2**14)


def outcomes_of(session, fails=()):
    for check in calibration_checks():
        try:
            if check.name in fails:
                raise RuntimeError("no")
            result = Result(check.name, Status.HOLDS, "", 0.0, check.run(session).data)
        except LeftOutError as reason:
            result = Result(check.name, Status.LEFT_OUT, str(reason), 0.0)
        except RuntimeError as error:
            result = Result(check.name, Status.ERROR, str(error), 0.0)
        yield Outcome((result,))


@pytest.mark.as_traced
def test_what_is_measured(cpus, small, tmp_path):
    outcomes = list(outcomes_of(Session(3, is_quick=False, timeout_seconds=60.0), fails=["matmul/float16"]))
    hardware = hardware_of(outcomes)
    assert hardware.measured and hardware.name == "3 x CPU" and "calibrate" in hardware.source
    assert set(hardware.matmul) == {"float32", "bfloat16"}  # what has no kernel is left out
    assert [flops for flops, _ in hardware.matmul["float32"]] == [2 * width**3 for width in (96, 192)]
    assert set(hardware.links) == {"within"} and set(hardware.links["within"]) == set(BUS_FACTORS)
    assert 1 <= hardware.sharing <= 3 and hardware.overlap >= 1
    assert min(hardware.bytes_per_second, hardware.step_seconds, hardware.update_seconds) > 0
    (found,) = (outcome.chief for outcome in outcomes if outcome.name == "block")
    assert hardware.operation_seconds == found.data["operation"] >= 0  # of so short a time it may be lost in the noise
    assert found.data["seconds"] > 0 and found.data["work"]["products"]
    hardware.to_file(tmp_path / "hardware.json")
    assert from_file(tmp_path / "hardware.json") == hardware
    with pytest.raises(RuntimeError, match="copy could not be measured: no"):
        hardware_of([Outcome((Result("copy", Status.ERROR, "no", 0.0),)), *outcomes])


def test_more_work_takes_longer(cpus):
    """So that nothing is computed before it is timed, as constants are: four times the width are 64 times the work."""
    session = Session(2, is_quick=False, timeout_seconds=60.0)
    times = [calibration.least_seconds(session.base, lambda w=w: calibration._product(w, "float32", 4)) for w in (192, 768)]
    assert times[1] > 4 * times[0]


def test_the_clock_is_read_in_each_round_of_one_device(cpus):
    """Whose ranks do not meet: TensorFlow's graph optimizer computes a clock that rests on constants once, for all rounds."""
    strategy = Session(1, is_quick=False, timeout_seconds=60.0).base
    timed = timing.Timed(strategy, functools.partial(timing._done, functools.partial(calibration._products, 96, "float32"), 1))
    few, many = timed.rounds(10), timed.rounds(10_000)
    assert len(set(few)) == len(few) > 1 and 0 < max(few) < min(many)


def test_a_round_ends_when_all_workers_are_through(cpus):
    """So that workers which share a processor are measured with their share, not the first one with what it had alone."""
    strategy = Session(2, is_quick=False, timeout_seconds=60.0).base
    assert timing.least_seconds(strategy, lambda: tf.zeros([])) > 0
    assert [[one.op for one in records] for records in strategy.last_plan.records] == [["all_reduce"] * 2] * 2


class Timed:
    """In the place of `timing.Timed`: counts things, each of so many seconds, with milliseconds on top that come and go."""

    def __init__(self, seconds_each, noise):
        self.seconds_each, self.around, self.traces = seconds_each, itertools.cycle((0.01, 0.01 + noise)), 0

    def __call__(self, strategy, on_rank):
        self.traces += 1
        things = functools.cache(lambda trips: float(on_rank(tf.constant(trips))))
        return types.SimpleNamespace(rounds=lambda trips: [next(self.around) + self.seconds_each * things(trips)])


def test_as_many_things_are_timed_at_once_as_take_long_beside_what_is_around_them(monkeypatch):
    told = types.SimpleNamespace(share=lambda _, value: value)

    def counting():
        return tf.zeros([]), lambda x: x + 1

    for seconds, traces in ((100e-6, 2), (5e-3, 1)):  # short ones once more, with several in a trip
        for noise in (0.003, -0.003):
            monkeypatch.setattr(timing, "Timed", fake := Timed(seconds, noise))
            assert timing.seconds_of_one(told, counting) == pytest.approx(seconds, rel=0.03)
            assert fake.traces == traces
    monkeypatch.setattr(timing, "_MOST_THINGS", 2**10)
    monkeypatch.setattr(timing, "Timed", Timed(0.0, -0.003))
    with pytest.raises(RuntimeError, match="no longer than what is around it"):
        timing.seconds_of_one(told, counting)


@pytest.mark.parametrize("name", ["2 x CPU", "a GPU"])
def test_bytes_of_a_block(name):
    """A time made of known rates gives back that of bytes. Copies keep theirs on a GPU, and where products alone take longer."""
    hardware = Hardware(name, {"float32": [(1.0, 5e9)]}, 3e9, 0.0, {}, function_seconds=1e-9, source="here")
    work = {"products": [2e6, 3e6], "functions": 1e5, "moved": 4e6, "large": 50}
    seconds, rate = 5e6 / 5e9 + 1e-4 + 4e6 / 8e9 + 50 * 20e-6, 3e9 if hardware.is_gpu else 8e9
    found = block.with_operations(hardware, 20e-6, seconds, work)
    assert found.operation_seconds == 20e-6 and found.bytes_per_second == pytest.approx(rate) and found.source == "here"
    noisy = block.with_operations(hardware, 0.0, 1e-6, work)
    assert noisy.bytes_per_second == 3e9 and ("bytes as of copies" in noisy.source) != hardware.is_gpu


def test_an_operation_that_is_lost_in_noise_is_measured_again_and_told(cpus, monkeypatch):
    """By the times of 1, 2 and 8 examples: the line through them is a ms below nothing at none, or 2 ms above."""
    session, traces = Session(1, is_quick=False, timeout_seconds=60.0), block.trace(block._block)
    monkeypatch.setattr(block, "trace", lambda _: traces)
    monkeypatch.setattr(tf, "function", lambda _: types.SimpleNamespace(get_concrete_function=lambda *_: None))
    lost, found = [0.1e-3, 1e-3, 7e-3], [3e-3, 4e-3, 10e-3]
    for times, words in (([*lost, *found], "µs"), ([*lost, *lost], "counted as nothing"), (found, "µs")):
        left = iter([*times, 40e-3])
        monkeypatch.setattr(block, "seconds_of_one", lambda *_, left=left: next(left))
        finding = block.block_seconds(session)
        assert words in finding.summary and not list(left) and finding.data["seconds"] == 40e-3
        assert (finding.data["operation"] > 0) == ("µs" in words)


@pytest.mark.exhaustive
def test_one_device_has_no_links(cpus, small):
    hardware = hardware_of(list(outcomes_of(Session(1, is_quick=False, timeout_seconds=60.0))))
    assert hardware.links == {} and hardware.sharing == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: --out"),
        (["--out", "no/such/folder/x.json"], "argument --out: must be a file in a directory that exists"),
        (["--out", "x.json", "--devices", "0"], "argument --devices: must be a positive integer"),
    ],
)
def test_what_is_refused(capsys, options, message):
    with pytest.raises(SystemExit) as error:
        main(["calibrate", *options], [add_calibrate])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_under_the_launcher(tmp_path):
    files = {"output": tmp_path / "out.txt", "errors": tmp_path / "err.txt"}
    options = ["run", "--workers", "2", "--cpu", "-m", "tfdist", "calibrate", "--out", "hardware.json"]
    environment = {**os.environ, "PYTHONPATH": str(workers.ROOT)}
    process = forks.start(main, options, environment=environment, folder=tmp_path, **files)
    try:
        process.wait(580)
    finally:
        process.kill()
    assert (tmp_path / "hardware.json").exists(), files["errors"].read_text()
    hardware = from_file(tmp_path / "hardware.json")
    assert hardware.name == "2 x CPU" and "memory that the workers share" in hardware.source
    assert set(hardware.links) == {"within", "staged"} and set(hardware.links["staged"]) == {"send"}
