"""The time of a step, where it is known by arithmetic."""

import dataclasses
import math

import pytest

from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.hardware import BUS_FACTORS, Collective, Hardware
from tfdist.tools.planning.step_time import Step, step_time

MIB = 2**20
LINKS = {kind: dict.fromkeys(BUS_FACTORS, Collective(0.01, beta)) for kind, beta in (("within", 1e9), ("between", 1e8))}
HARDWARE = Hardware("a test", {"float32": [(1e9, 1e12)]}, math.inf, 0.0, LINKS, update_seconds=1e-9)
STEP = Step(forward=1.0, backward=2.0, stage_share=1.0, parameter_bytes=4e8, parameters=1e8, messages=1)


def seconds(candidate, step=STEP, devices_per_host=64, **changes):
    return step_time(step, candidate, dataclasses.replace(HARDWARE, **changes), devices_per_host)


def test_one_device_only_computes():
    time = seconds(Candidate(0))
    assert time.together == time.compute == 3.1 and time.communication == time.hidden == time.bubble == 0
    assert seconds(Candidate(0), step_seconds=0.5).together == 3.6


def test_messages_of_the_stages():
    """Over four ranks: the bytes of an all-reduce are those of a reduce-scatter and an all-gather; stage 3 gathers twice."""
    half = 0.01 + 4e8 * 0.75 / 1e9
    times = [seconds(Candidate(stage, data=4)) for stage in range(4)]
    assert [time.communication for time in times] == pytest.approx([2 * half - 0.01, 2 * half, 2 * half, 3 * half])
    assert [time.compute for time in times] == pytest.approx([3.1, 3.025, 3.025, 3.025])  # the update is of a shard
    exposed = [0, half, 0, 0]  # stage 1 gathers when all is updated
    assert [time.together for time in times] == pytest.approx(
        [time.compute + one for time, one in zip(times, exposed, strict=True)]
    )
    assert times[3].hidden == pytest.approx(3 * half)


def test_a_pipeline_gathers_once_at_stage_3():
    """Its weights stay until the last microbatch is through: as many bytes as at stage 2."""
    pipeline = {"data": 2, "pipeline": 2, "schedule": "gpipe", "microbatches": 4}
    two, three = (seconds(Candidate(stage, **pipeline), bytes_per_second=1e11) for stage in (2, 3))
    assert three.communication == pytest.approx(two.communication) and three.compute == pytest.approx(two.compute)


def test_messages_are_packed_and_unpacked():
    """Gradients are packed, and sums or updated parameters unpacked; stage 3 unpacks its parameters once more."""
    candidates = [Candidate(stage, data=4) for stage in range(4)]
    more = [seconds(one, bytes_per_second=1e9).compute - seconds(one).compute for one in candidates]
    assert more == pytest.approx([2 * 0.8] * 3 + [3 * 0.8])  # each copy reads all bytes, and writes them
    assert seconds(Candidate(0), bytes_per_second=1e9) == seconds(Candidate(0))


def test_messages_that_take_longer_than_backward_and_overlap():
    slow = seconds(Candidate(0, data=4), devices_per_host=2)
    message = 0.01 + 4e8 * 1.5 / 1e8
    assert slow.together == pytest.approx(1.0 + message + 0.1) and slow.hidden == pytest.approx(2.0)
    assert seconds(Candidate(0, data=4), devices_per_host=2, overlap=1.1).together == pytest.approx(
        1.0 + message + 0.1 * 2.0 + 0.1
    )
    # Never longer than one after the other.
    assert seconds(Candidate(0, data=4), devices_per_host=2, overlap=9.0).together == pytest.approx(3.0 + message + 0.1)


def test_groups_of_ranks_that_share_one_copy():
    """Gathers stay within a host of two devices; only shards of gradients are summed between the hosts."""
    grouped = seconds(Candidate(3, data=4, sharding_group_size=2), devices_per_host=2)
    within, between = 0.01 + 4e8 * 0.5 / 1e9, 0.01 + 2e8 / 1e8
    assert grouped.communication == pytest.approx(3 * within + between)
    assert grouped.communication < seconds(Candidate(3, data=4), devices_per_host=2).communication


def test_compressed_gradients_are_fewer_bytes_and_more_work():
    settings = {"devices_per_host": 2, "bytes_per_second": 1e11}
    exact, compressed = (seconds(Candidate(0, data=4, gradient_compression=name), **settings) for name in (None, "int8"))
    assert compressed.communication == pytest.approx(0.01 + (exact.communication - 0.01) * (0.25 + 1 / 256))
    assert compressed.compute > exact.compute and compressed.together < exact.together


def test_tensor_ranks_wait_for_their_messages():
    step = dataclasses.replace(STEP, tensor_bytes=1e9, tensor_messages=8)
    time = seconds(Candidate(0, tensor=2), step)
    assert time.communication == pytest.approx(8 * 0.01 + 1.0) and time.hidden == pytest.approx(0)
    assert time.together == pytest.approx(time.compute + time.communication)
    assert seconds(Candidate(0, tensor=2), step, devices_per_host=1).communication == pytest.approx(8 * 0.01 + 10.0)
    again = seconds(Candidate(0, tensor=2, recompute=True), dataclasses.replace(step, recomputed=1.0))
    assert again.communication == pytest.approx(1.5 * time.communication)  # the messages of forward are half of them


def test_a_pipeline_is_the_simulation_of_its_schedule():
    """1F1B of p equal stages and m microbatches takes (m + p - 1) times what a microbatch takes on a stage."""
    step = dataclasses.replace(STEP, stage_share=0.25, parameters=0.0, parameter_bytes=0.0)
    links = {"within": dict.fromkeys(BUS_FACTORS, Collective(0.0, math.inf))}
    for schedule in ("1f1b", "gpipe"):
        time = seconds(Candidate(0, pipeline=4, schedule=schedule, microbatches=8), step, links=links)
        assert time.together == pytest.approx((8 + 3) * 0.75)
        assert time.bubble == pytest.approx(3 * 0.75) and time.compute == pytest.approx(8 * 0.75)
    slower = dataclasses.replace(step, stage_share=0.5)
    assert seconds(Candidate(0, pipeline=4, schedule="1f1b", microbatches=8), slower, links=links).compute == pytest.approx(12)
    sent = dataclasses.replace(step, border_bytes=1e8)
    with_messages = seconds(Candidate(0, pipeline=4, schedule="1f1b", microbatches=8), sent)
    assert with_messages.together > (8 + 3) * 0.75 + 2 * 3 * 0.1  # the way there and back of the first and the last


def test_a_pipeline_adds_up_the_gradients_of_its_microbatches():
    links = {"within": dict.fromkeys(BUS_FACTORS, Collective(0.0, math.inf))}
    step = dataclasses.replace(STEP, stage_share=0.5, parameters=0.0)
    four = seconds(Candidate(0, pipeline=2, schedule="gpipe", microbatches=4), step, links=links, bytes_per_second=1e11)
    assert four.together == pytest.approx((4 + 1) * 1.5 + 3 * 3 * 4e8 / 1e11)


def order(step, candidates, **changes):
    times = {one.name(): seconds(one, step, **changes).together for one in candidates}
    return sorted(times, key=times.get)


def test_the_order_of_plans_is_that_of_closed_formulas():
    """With P bytes of parameters, C seconds of computation and links of B bytes per second, four devices."""
    fast, slow = ({"within": dict.fromkeys(BUS_FACTORS, Collective(0.0, beta))} for beta in (1e12, 1e8))
    stages = [Candidate(stage, data=4) for stage in range(4)]
    # All messages are hidden: what is left is the update, P / 4 of it but for stage 0; stage 1 gathers at last.
    assert order(STEP, stages, links=fast) == ["zero 2", "zero 3", "zero 1", "zero 0"]
    # A half of an all-reduce takes 1.875 s: backward, 2 s, hides one half of stage 1 and not two of stages 0 and 2; forward, 1 s,
    # does not hide the gather of stage 3.
    slower = {"within": dict.fromkeys(BUS_FACTORS, Collective(0.0, 1.6e8))}
    assert order(STEP, stages, links=slower) == ["zero 2", "zero 0", "zero 1", "zero 3"]
    # A pipeline of p stages that all rows go through takes (m + p - 1) / m of what p replicas take without messages, and sends
    # little; replicas send all parameters. So over fast links replicas are faster, over slow ones the pipeline is.
    replicas = dataclasses.replace(STEP, parameters=0.0)
    for m in (4, 16):
        rows = {"forward": 4 * STEP.forward / m, "backward": 4 * STEP.backward / m}
        stages_of = dataclasses.replace(replicas, **rows, stage_share=0.25, parameter_bytes=0.0)
        pipeline = Candidate(0, pipeline=4, schedule="1f1b", microbatches=m)
        taken = [seconds(pipeline, stages_of, links=links).together for links in (fast, slow)]
        assert taken == pytest.approx([3.0 * (m + 3) / m] * 2)
        whole = [seconds(Candidate(0, data=4), replicas, links=links).together for links in (fast, slow)]
        assert whole == pytest.approx([3.0, 1.0 + 1.5 * 4e8 / 1e8])
        assert whole[0] < taken[0] and taken[1] < whole[1]


def test_devices_that_share_a_processor_do_not_wait():
    step = dataclasses.replace(STEP, stage_share=0.25, parameters=0.0, parameter_bytes=0.0)
    links = {"within": dict.fromkeys(BUS_FACTORS, Collective(0.0, math.inf))}
    time = seconds(Candidate(0, pipeline=4, schedule="1f1b", microbatches=8), step, links=links, sharing=4.0)
    assert time.bubble == 0 and time.together == pytest.approx(8 * 0.75)
    # What a message takes to start is time of the processor: overlap hides its bytes, and not that. Devices of their own send
    # meanwhile.
    for link, overlap, exposed in (
        (Collective(0.01, math.inf), 1.0, 0.01),
        (Collective(0.0, 1e8), 1.0, 0.0),
        (Collective(0.0, 1e8), 2.0, 0.01),
    ):
        slower = {"within": dict.fromkeys(BUS_FACTORS, link)}
        sends, plan = dataclasses.replace(step, border_bytes=1e6), Candidate(0, pipeline=4, schedule="1f1b", microbatches=8)
        times = [seconds(plan, sends, links=slower, overlap=overlap, sharing=sharing) for sharing in (4.0, 1.02)]
        assert times[0].together == pytest.approx(8 * 0.75 + 2 * 8 * exposed)
        assert times[1].together == pytest.approx((8 + 3) * 0.75, rel=0.05)


def test_recomputation_is_a_forward_more():
    step = dataclasses.replace(STEP, recomputed=1.0)
    assert seconds(Candidate(0, recompute=True), step).together == pytest.approx(4.1)
