"""What is told of a step's timeline, on one made by hand; and the whole program, on null GPUs."""

import dataclasses
import json

import pytest

from benchmarks import best_order, gpu_timeline, timelines
from benchmarks.best_order import Model, Product, Sent
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
    """Four layers, a group each: what a product reads is gathered before, the last reduction has nothing to hide behind."""
    products = [(10 * place, 10 * place + 10) for place in range(4)] + [(40 + 10 * place, 50 + 10 * place) for place in range(7)]
    gathers = [message("AllGather", 10 * place, 10 * place + 4) for place in range(4)]
    again = [message("AllGather", 40 + 10 * place, 44 + 10 * place) for place in range(3)]
    reductions = [message("ReduceScatter", 80 + 6 * place, 86 + 6 * place) for place in range(4)]
    timeline = Timeline(products, [*gathers, *again, *reductions], model=Model(4, zero_stage=3))
    assert timeline.compute_us == 110 and timeline.message_us == 7 * 4 + 4 * 6
    # In the best order the first gather comes before the first product, and the last reduction after the last.
    assert timeline.ideal_us == 4 + 110 + 6 and timeline.can_hide_us == 6 * 4 + 3 * 6
    assert timeline.hidden_us == 28 + 24 and timeline.waits(1) == 0
    late = dataclasses.replace(timeline, messages=[*gathers, *again, *(message("ReduceScatter", 110, 116 + n) for n in range(4))])
    assert late.waits(1) == 0 and late.hidden_us == 28


def test_without_prefetch_a_gather_waits_for_the_group_before():
    messages = [*[message("AllGather", 0, 4)] * 7, *[message("ReduceScatter", 0, 1)] * 4]
    products = [(10 * place, 10 * place + 10) for place in range(11)]
    ideals = [Timeline(products, messages, model=Model(4, zero_stage=3, prefetch=prefetch)).ideal_us for prefetch in range(3)]
    assert ideals == [
        4 * 4 + 110 + 1,
        4 + 110 + 1,
        4 + 110 + 1,
    ]  # backward has gradients of weights to hide it


def test_new_parameters_are_sent_when_a_product_has_ended():
    """The update stands on the stream of the products: 11 to 14 the reduction, to 20 the product, to 23 the gather."""
    products = [Product(10) for _ in range(3)]
    messages = [Sent(4, 1), Sent(3, 1, updated_by=0)]
    computed, sent = best_order.schedule(products, messages)
    assert computed == [(0, 10), (10, 20), (20, 30)] and sent == [(10, 14), (20, 23)]


def test_parameters_that_follow_the_last_gradient_cannot_hide():
    reductions = [message("ReduceScatter", 30, 32), message("ReduceScatter", 50, 52)]
    gathers = [message("AllGather", 52, 55), message("AllGather", 55, 58)]
    timeline = Timeline([(10 * n, 10 * n + 10) for n in range(5)], [*reductions, *gathers], model=Model(2, zero_stage=1))
    assert timeline.can_hide_us == 2 + 3 and timeline.hidden_us == 2 and timeline.hidden_share == 0.4
    assert timeline.ideal_us == 50 + 2 + 3


def test_the_sum_of_a_loss_is_no_gradient():
    messages = [message("AllReduce", 20, 22), message("AllReduce", 22, 23, size=4), message("AllReduce", 50, 54)]
    timeline = Timeline([(10 * n, 10 * n + 10) for n in range(5)], messages, model=Model(2))
    assert timeline.can_hide_us == timeline.hidden_us == 2 and timeline.ideal_us == 54


def test_a_slow_link_cannot_hide_behind_less_than_it_takes():
    """Two products follow the last layer's gradient, which takes as long as three."""
    timeline = Timeline(
        [(10 * n, 10 * n + 10) for n in range(5)], [message("AllReduce", 30, 60), message("AllReduce", 60, 90)], model=Model(2)
    )
    assert timeline.can_hide_us == timeline.hidden_us == 20 and timeline.ideal_us == timeline.step_us == 90


def test_on_a_chain_a_message_begins_with_the_end_of_a_product():
    products = [Product(10) for _ in range(3)]
    messages = [Sent(4), Sent(4)]
    assert best_order.schedule(products, messages)[1] == [(0, 4), (4, 8)]
    assert best_order.schedule(products, messages, is_chain=True)[1] == [(0, 4), (10, 14)]


def test_what_waits_for_itself_is_an_error():
    with pytest.raises(ValueError, match="They wait for each other: 0 products and messages"):
        best_order.schedule([Product(1, after=(0,))], [Sent(1, after_products=1)])


def test_a_link_takes_what_it_takes_beside_products():
    """8192 tokens x 2 operations of a weight at 400 TFLOP/s, 4 bytes of it at 50 GB/s: messages take 1.95 times as long."""
    args = gpu_timeline.parse_args(["--width", "512", "--product-us", "1000"])
    mib_per_layer = 4 * 512**2 / 2**20
    assert gpu_timeline.microseconds_per_mib(args, "400gbit") * mib_per_layer == pytest.approx(1953.125)


def test_activations_go_first_and_those_of_forward_cannot_hide():
    """Two pairs of layers, of 10 each; activations of 4 after each pair and before backward's second, gradients of 8."""
    model = Model(4, tensor=True)
    assert model.backward() == [*[("x", 3), ("x", 2), ("w", 3), ("w", 2)], *[("x", 1), ("w", 1), ("w", 0)]]
    products = [(10 * n, 10 * n + 10) for n in range(11)]
    activations = [message("AllReduce", 20, 24), message("AllReduce", 40, 44), message("AllReduce", 60, 64)]
    timeline = Timeline(products, [message("AllReduce", 80, 88), message("AllReduce", 110, 118)], activations, model=model)
    assert timeline.can_hide_us == 4 + 8 and timeline.ideal_us == 110 + 4 + 4 + 8


def test_a_bubble_is_no_loss():
    """A pipeline of two layers on this device and two microbatches: it waits from 20 to 26 for another, then for a message."""
    model = Model(2, microbatches=2)
    assert model.before == 2 * 5 - 3
    products = [(10 * n, 10 * n + 10) if n < 2 else (10 * n + 8, 10 * n + 18) for n in range(10)]
    messages = [message("AllReduce", 26, 28), message("AllReduce", 108, 111)]
    timeline = Timeline(products, messages, model=model)
    assert timeline.ideal_us == 100 + 6 + 3 and timeline.can_hide_us == 2


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
    for record, products in zip(records, (11, 4 * 5, 11, 11), strict=True):  # of the first device
        assert record["compute_us"] >= products * 2000 and record["message_us"] > 0
        assert record["step_us"] >= record["compute_us"]
    assert picture.stat().st_size > 1000 and len(lines) == 4 + 6
