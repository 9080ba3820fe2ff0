"""What passes behind products on null GPUs, where the host is far ahead of the devices; and what memory that takes.

A product takes as long as hundreds of kernels are queued in, and a message about half as long: so what is told here is told by
the order of streams, on a busy machine too.
"""

import dataclasses
import json

import pytest

from benchmarks import gpu_timeline
from benchmarks.gpu_timeline import timeline_of
from benchmarks.timelines import extent
from tests.null_gpu import building, running
from tests.null_gpu.hazards import hazards, most_gathered, reused
from tests.null_gpu.lead_program import LAYER_BYTES, LAYERS, STEPS
from tests.null_gpu.log import Log, Record
from tests.null_gpu.running import Machine

MACHINE = Machine(2, bytes=1 << 30, product_us=20_000, message_us_per_mib=10_000)
DEFAULT = {
    "stage 0": {"zero_stage": 0, "bucket_bytes": LAYER_BYTES},
    "stage 3": {"zero_stage": 3, "group_bytes": 0},
    "predict": {"zero_stage": 3, "group_bytes": 0, "predicts": True},
}
MORE = {
    "stage 2": {"zero_stage": 2, "bucket_bytes": LAYER_BYTES},
    "stage 1": {"zero_stage": 1, "bucket_bytes": LAYER_BYTES},
    "stage 3, prefetch 2": {"zero_stage": 3, "group_bytes": 0, "prefetch": 2},
    "stage 3, prefetch 0": {"zero_stage": 3, "group_bytes": 0, "prefetch": 0},
    "predict, prefetch 0": {"zero_stage": 3, "group_bytes": 0, "prefetch": 0, "predicts": True},
    "predict, prefetch 2": {"zero_stage": 3, "group_bytes": 0, "prefetch": 2, "predicts": True},
}


@pytest.fixture(scope="module", params=[DEFAULT, pytest.param(MORE, marks=pytest.mark.exhaustive)], ids=["default", "more"])
def ended(request, tmp_path_factory):
    if reason := building.missing():
        pytest.skip(reason)
    program = ["-m", "tests.null_gpu.lead_program", json.dumps(request.param)]
    ended = running.run(tmp_path_factory.mktemp("lead"), MACHINE, program, seconds=280)
    assert ended.codes == [0], ended.outputs[0][-3000:]
    assert not {name: result["error"] for name, result in ended.results[0].items() if "error" in result}
    assert list(ended.results[0]) == list(request.param) and not ended.log.errors()
    return ended


def _hidden(log, name):
    """Returns how many messages a step has, and how many of them overlap a product in the step in which most do."""
    most = 0
    for step in range(1, STEPS):
        timeline = timeline_of(log, f"{name} {step}")
        messages = [message for message in timeline.messages if message.bytes > 1024]
        assert len(messages) >= LAYERS, name
        most = max(most, sum(any(a < one.span[1] and one.span[0] < b for a, b in timeline.products) for one in messages))
    return len(messages), most


def test_messages_pass_behind_products(ended):
    """About half of all at least. When all stood on a chain: of `DEFAULT` 0 of 6, 1 of 16, 0 of 6; of stage 2, 3 of 12."""
    for name in ended.results[0]:
        if name.endswith("prefetch 0"):
            continue  # a gather begins when the layer before it has been computed
        messages, hidden = _hidden(ended.log, name)
        assert hidden >= messages / 2 - 1, f"{name}: {hidden} of {messages} messages overlap a product"


@pytest.mark.exhaustive
def test_messages_pass_behind_products_between_processes(null_gpus):
    """There all stand on a chain. Of these, without parts of products: all of stage 0, half of stage 2, none of stage 3."""
    cases = {name: {**DEFAULT, **MORE}[name] for name in ("stage 0", "stage 2", "stage 3")}
    machine = dataclasses.replace(MACHINE, devices=1, product_us=40_000, message_us_per_mib=5_000)
    ended = null_gpus(machine, ["-m", "tests.null_gpu.lead_program", json.dumps(cases)], 2, 280)
    assert ended.codes == [0, 0], ended.outputs[0][-3000:]
    log = ended.log.of_process(ended.processes[0])
    for name in cases:
        messages, hidden = _hidden(log, name)
        assert hidden >= messages * 2 / 3 - 1, f"{name}: {hidden} of {messages} messages overlap a product"
    assert hazards(ended.log) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "least"),
    [
        ("data 2 x tensor 2", 0.6),
        ("data 2 x pipe 2", 0.7),
        ("data 2 x tensor 2, 2 processes", 0.6),
        ("data 2 x pipe 2, 4 processes", 0.7),
    ],
)
def test_gradients_pass_behind_products_in_every_mesh(mesh, least):
    """Of the best of three steps on a busy machine. Before activations went first, and a stage's calls in turn: nothing of it.

    With tensor ranks in two processes two fifths, while what reads activations was queued before the message that follows theirs.
    A pipeline's first rank computes for at least 83 products: 6 until the last one begins, whose 72 it waits for but the last 6,
    and 11 of its own. It was up to 123 between processes, and 110 in one, while messages waited for actions that had been queued
    when they began.
    """
    if reason := building.missing():
        pytest.skip(reason)
    product_us = 40_000
    args = gpu_timeline.parse_args(["--contenders", "stage 0", "stage 2", "--product-us", str(product_us)])
    found = gpu_timeline.run(args, gpu_timeline.MESHES[mesh], "nvlink", 2)
    assert list(found) == ["stage 0", "stage 2"]
    if "pipe" in mesh:
        steps = {name: min(extent(timeline.products) for timeline in timelines) for name, timelines in found.items()}
        assert max(steps.values()) < 90 * product_us, steps
    shares = {name: max(timeline.hidden_share for timeline in timelines) for name, timelines in found.items()}
    assert min(shares.values()) > least, shares


def test_no_more_groups_are_gathered_than_prefetch_says(ended):
    """The host is ahead of the device, and asks for memory long before the device needs it.

    The allocator's peak may tell more on one device: it gives a block of up to twice what was asked for.
    """
    for name, result in ended.results[0].items():
        if name.startswith("predict"):
            prefetch = int(name[-1]) if "prefetch" in name else 1
            step = ended.log.between(f"{name} 1 begins", f"{name} 1 ends")
            assert [most_gathered(step, device) for device in range(MACHINE.devices)] == [prefetch + 1] * MACHINE.devices, name
            peaks = [(peak - rest) / LAYER_BYTES for rest, peak in zip(result["rest"], result["peak"], strict=True)]
            assert prefetch + 0.9 < min(peaks) < prefetch + 1.3, name


def test_memory_is_that_of_the_formula(ended):
    """States of stages 0 to 3; in a step, besides, full gradients where they are not sharded, else their shards and what is in
    flight: a unit is a layer's bytes. On one device the allocator may give more, as above."""
    n = MACHINE.devices
    states = {"stage 0": 3, "stage 1": 1 + 2 / n, "stage 2": 1 + 2 / n, "stage 3": 3 / n}
    more = {"stage 0": LAYERS + 2, "stage 1": LAYERS + 2, "stage 2": LAYERS / n + 4, "stage 3": LAYERS / n + 6}
    for name, result in ended.results[0].items():
        stage = name.partition(",")[0]
        if stage in states:
            kept = [each / LAYER_BYTES for each in result["states"]]
            assert min(kept) == pytest.approx(states[stage] * LAYERS, abs=0.2), name
            peaks = [(peak - rest) / LAYER_BYTES for rest, peak in zip(result["rest"], result["peak"], strict=True)]
            assert min(peaks) < more[stage], name


def test_nothing_is_given_away_that_a_message_uses(ended):
    assert hazards(ended.log) == []
    assert reused(ended.log) > LAYERS


def test_hazards_are_seen():
    """A message reads 0x100 to 0x200 and writes 0x300 to 0x400 from 10 to 20; it was queued at 5."""
    message = "AllReduce x 0 2 0 256 float32 sum 0x100 0x300 10.0".split()
    for queued, span, read, written, words in [
        (6, (15, 16), "0x500", "0x180", "a product writes what AllReduce 0 of 256 bytes on device 0 still reads"),
        (6, (8, 9), "0x380", "0x500", "a product uses what AllReduce 0 of 256 bytes on device 0 has not written yet"),
        (1, (2, 12), "0x380", "0x500", "AllReduce 0 of 256 bytes on device 0 writes what an earlier product uses"),
        (1, (2, 12), "0x180", "0x500", None),
        (6, (21, 22), "0x380", "0x180", None),
    ]:
        product = ("cublasSgemm_v2", read, "16", "0x600", "16", written, "16")
        records = [Record("nccl", 1, 0, 2, 5, 10, 20, tuple(message)), Record("product", 1, 0, 1, queued, *span, product)]
        assert hazards(Log(records)) == ([] if words is None else [words])
