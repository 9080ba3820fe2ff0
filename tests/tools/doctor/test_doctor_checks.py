"""What the checks take for right and for wrong."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives.transports import kernels
from tfdist.tools.doctor import bandwidth, parity
from tfdist.tools.doctor.check import LeftOutError
from tfdist.tools.doctor.parity import TOLERANCES, compared
from tfdist.tools.doctor.session import Session


def trained(factor=1.0, noise=0.0):
    """Returns what a training leaves behind whose gradient of one weight is off by a factor, and all by some noise."""
    rng = np.random.default_rng(0)
    moves = [rng.normal(size=(33, 48)), rng.normal(size=7)]
    noisy = [move * (1 + noise * rng.uniform(-1, 1, size=move.shape)) for move in moves]
    names = ["losses", "the change of a", "the change of b", "the optimizer's a"]
    return list(zip(names, [np.array([2.0, 1.0]), factor * noisy[0], noisy[1], factor * noisy[0]], strict=True))


@pytest.mark.parametrize(
    ("dtype", "noise"),
    [("float32", 1e-6), ("tensor_float_32", 1e-3), ("mixed_float16", 1e-3), ("mixed_bfloat16", 2e-2)],
)
def test_rounding_holds_and_a_wrong_gradient_does_not(dtype, noise):
    tolerance = TOLERANCES[dtype]
    assert compared(trained(noise=noise), trained(), tolerance).holds
    for factor in (0.5, 2.0, 0.0, math.nan, math.inf):
        finding = compared(trained(factor), trained(), tolerance)
        assert not finding.holds and finding.data["in"] == "the change of a"


def test_nothing_learnt_is_no_proof():
    with pytest.raises(RuntimeError, match="nothing to compare"):
        compared(trained(0.0), trained(0.0), 1.0)


@pytest.fixture
def session(cpus):
    """Three of the CPUs that this process has."""
    return Session(3, is_quick=True, timeout_seconds=60.0)


def test_a_transport_that_loses_a_part_of_the_gradient_is_found(cpus, monkeypatch):
    (check,) = (check for check in parity.parity_checks() if check.name == "parity/zero_stage_2")
    session = Session(2, is_quick=True, timeout_seconds=60.0)
    assert check.run(session).holds
    own_part = lambda _, program, x, ranks, label, dtype: tf.cast(x[ranks.index(program.rank)], dtype)  # noqa: E731
    monkeypatch.setattr(kernels.Ring, "reduce_scatter", own_part)
    finding = check.run(session)
    assert not finding.holds and finding.data["deviation"] > 0.1


def test_left_out_with_the_reason(session):
    reasons = {}
    for check in parity.parity_checks():
        if check.name.partition("/")[2] in ("tensor_parallel_2", "pipeline_2", "tensor_float_32"):
            with pytest.raises(LeftOutError) as reason:
                check.run(session)
            reasons[check.name] = str(reason.value)
    needs = "needs a number of devices that 2 divides, and there are 3"
    assert reasons == {
        "parity/tensor_parallel_2": f"tensor_parallel_2 {needs}",
        "parity/pipeline_2": f"pipeline_2 {needs}",
        "parity/tensor_float_32": "these devices have no TensorFloat-32",
    }


def test_one_device_has_nothing_to_send(cpus):
    with pytest.raises(LeftOutError, match="there is one device, and a collective needs several"):
        bandwidth.bandwidth_checks()[0].run(Session(1, is_quick=True, timeout_seconds=60.0))


def test_more_devices_than_there_are(cpus):
    with pytest.raises(ValueError, match=r"`--devices` asks for more than there are: 4 CPUs. Received: devices=9"):
        _ = Session(9, is_quick=True, timeout_seconds=60.0).devices


def test_a_collective_that_brings_something_else_is_an_error(session, monkeypatch):
    wrong = bandwidth.COLLECTIVES["broadcast"]
    monkeypatch.setattr(bandwidth, "_QUICK_SIZES", (1024,))
    monkeypatch.setitem(bandwidth.COLLECTIVES, "broadcast", bandwidth.Collective(
        lambda x, *_: x, wrong.input_part, wrong.first))  # fmt: skip
    check = next(check for check in bandwidth.bandwidth_checks() if check.name == "bandwidth/broadcast")
    with pytest.raises(RuntimeError, match="rank 1 got 32 in the place of 16"):
        check.run(session)
