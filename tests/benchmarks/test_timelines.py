"""What is told of a step's timeline, on one made by hand; and the whole program, on null GPUs."""

import dataclasses
import json

import pytest

from benchmarks import gpu_timeline, timelines
from benchmarks.timelines import Message, Timeline
from tests.null_gpu import building

pytestmark = pytest.mark.timeout(300)


def message(op, begin, end, size=1 << 20):
    return Message(op, (begin, end), size)


def test_spans():
    assert timelines.union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert timelines.length([(0, 2), (1, 3), (5, 6)]) == 4
    assert timelines.overlap([(0, 4), (6, 8)], [(3, 7)]) == 2


def test_stage_3():
    """Gathers before, behind and after a product; the last reduction has nothing to hide behind."""
    messages = [
        message("AllGather", 0, 2),
        message("AllGather", 3, 5),
        message("AllGather", 12, 14),
        message("ReduceScatter", 15, 17),
        message("ReduceScatter", 20, 24),
    ]
    timeline = Timeline([(2, 12), (14, 20)], messages)
    assert timeline.step_us == 24 and timeline.compute_us == 16 and timeline.message_us == 12
    assert timeline.hidden_us == 4 and timeline.cannot_hide_us == 6 and timeline.can_hide_us == 6
    assert timeline.hidden_share == pytest.approx(4 / 6)
    assert timeline.ideal_us == 16 + 6
    assert timeline.waits(2) == 1 and timeline.waits(2.5) == 0


def test_parameters_that_follow_the_last_gradient_cannot_hide():
    timeline = Timeline(
        [(0, 10)], [message("ReduceScatter", 5, 7), message("ReduceScatter", 10, 12), message("AllGather", 12, 15)]
    )
    assert timeline.cannot_hide_us == 5 and timeline.can_hide_us == 2 and timeline.hidden_share == 1 and timeline.waits(1) == 0


def test_the_sum_of_a_loss_is_no_gradient():
    """It ends every step, and would be taken for the last reduction."""
    messages = [message("AllReduce", 5, 7), message("AllReduce", 10, 14), message("AllReduce", 14, 15, size=4)]
    timeline = Timeline([(0, 10)], messages)
    assert timeline.cannot_hide_us == 5 and timeline.can_hide_us == 2 and timeline.ideal_us == 15


def test_a_slow_link_cannot_hide_behind_less_than_it_takes():
    timeline = Timeline([(0, 10)], [message("AllReduce", 1, 31), message("AllReduce", 31, 61)])
    assert timeline.can_hide_us == 10 and timeline.ideal_us == 60 and timeline.hidden_us == 9


def test_nothing_is_sent():
    timeline = Timeline([(0, 10)], [])
    assert timeline.hidden_share == 1 and timeline.message_us == 0 and timeline.ideal_us == timeline.step_us == 10


def test_a_link_takes_what_it_takes_beside_products():
    """8192 tokens x 2 operations of a weight at 400 TFLOP/s, 4 bytes of it at 50 GB/s: messages take 1.95 times as long."""
    args = gpu_timeline.parse_args(["--width", "512", "--product-us", "1000"])
    mib_per_layer = 4 * 512**2 / 2**20
    assert gpu_timeline.microseconds_per_mib(args, "400gbit") * mib_per_layer == pytest.approx(1953.125)


def test_activations_of_forward_cannot_hide_and_those_of_backward_can():
    products = [(0, 10), (12, 20), (20, 30), (30, 34)]
    timeline = Timeline(products, [message("AllReduce", 34, 37)], [message("AllReduce", 10, 12), message("AllReduce", 25, 32)], 2)
    assert timeline.can_hide_us == timeline.hidden_us == 7
    assert timeline.ideal_us == 18 + 2 + 14 + 3 == timeline.step_us and timeline.message_us == 3
    late = dataclasses.replace(timeline, activations=[message("AllReduce", 10, 12), message("AllReduce", 33, 40)])
    assert late.can_hide_us == 7 and late.hidden_us == 1


def test_gradients_hide_behind_the_backward_pass_alone():
    """Of 20 that are sent there 10 can; the gather, which has forward to hide behind, is another matter."""
    products = [(5, 15), (20, 30)]
    messages = [
        message("AllGather", 0, 5),
        message("AllGather", 5, 9),
        message("AllReduce", 20, 40),
        message("AllReduce", 40, 42),
    ]
    timeline = Timeline(products, messages, before=1)
    assert timeline.can_hide_us == 4 + 10 and timeline.hidden_us == 14 and timeline.cannot_hide_us == 7
    assert timeline.ideal_us == 10 + 20 + 7


def test_a_bubble_is_no_loss():
    """Products 0 to 4, 8 to 10 and the last backward from 12 on; between them this device waits for another, 6 in all."""
    products = [(0, 4), (8, 10), (12, 14), (14, 16)]
    timeline = Timeline(products, [message("AllReduce", 14, 15), message("AllReduce", 16, 18)], before=2, is_pipeline=True)
    assert timeline.ideal_us == timeline.step_us == 18 and timeline.hidden_share == 1
    assert dataclasses.replace(timeline, is_pipeline=False).ideal_us == 12


@pytest.mark.exhaustive
@pytest.mark.skipif(building.missing() is not None, reason=building.missing() or "")
def test_the_program(capsys, tmp_path):
    picture = tmp_path / "timeline.png"
    sizes = "--layers 4 --width 256 --product-us 2000 --steps 1 --links nvlink"
    meshes = ["--meshes", "data 2 x tensor 2", "data 2 x pipe 2", "2 processes"]
    assert gpu_timeline.main([*sizes.split(), *meshes, "--contenders", "mirrored", "stage 3", "--picture", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert [record["contender"] for record in records] == ["stage 3", "stage 3", "mirrored", "stage 3"]
    for record, products in zip(records, (11 / 2, 5, 11, 11), strict=True):  # of the first device, a layer's on the whole batch
        assert record["compute_us"] >= products * 2000 and record["message_us"] > 0
        assert record["step_us"] >= record["compute_us"]
    assert picture.stat().st_size > 1000 and len(lines) == 4 + 6
