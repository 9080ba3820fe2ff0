"""What the transports of TensorFlow's kernels emit. GPUs are pretended: NCCL programs are traced and looked at, never run."""

import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from pretended_gpus import pretended_gpus
from ranks import integers, run, strategy_on, trace

from tfdist.collectives import (
    NCCL,
    RING,
    Communicator,
    activations,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    current_program,
    group_ops,
    reduce_scatter,
)
from tfdist.collectives.program import RankProgram
from tfdist.collectives.transports import kernels
from tfdist.collectives.transports.kernel_messages import OrderedMessages
from tfdist.collectives.transports.kernel_settings import TIMEOUT_SECONDS, byte_dtype

pytestmark = pytest.mark.timeout(120)

DTYPES = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def test_their_hints():
    assert (RING.hint, NCCL.hint) == ("ring", "nccl")


def test_bytes_move_in_a_dtype_of_the_same_width():
    assert byte_dtype(tf.bfloat16) == tf.float16
    assert all(byte_dtype(dtype).size == dtype.size for dtype in DTYPES)
    assert all(byte_dtype(dtype) == dtype for dtype in DTYPES if dtype != tf.bfloat16)


def emitted(function, chosen, *specs):
    """Returns the collective operations that `function` emits on 2 ranks with the transport `chosen`, and the plan."""
    strategy = strategy_on(2)
    strategy.extended.communicator = Communicator(strategy.mesh, chosen)
    graph = trace(strategy, function).get_concrete_function(*specs).graph
    return [op for op in graph.get_operations() if op.type.startswith("Collective")], strategy.last_plan


def every_op(dtype):
    def rank():
        x = tf.ones([4, 3], dtype)
        return all_reduce(x), all_gather(x), reduce_scatter(x), all_to_all(x), broadcast(x)

    return rank


def test_the_ring_has_no_reduce_scatter():
    ops, plan = emitted(every_op(tf.float32), RING)
    types = {op.type for op in ops}
    assert types == {
        "CollectiveReduceV2",
        "CollectiveGatherV2",
        "CollectiveAllToAllV2",
        "CollectiveBcastSendV2",
        "CollectiveBcastRecvV2",
    }
    assert {op.get_attr("communication_hint") for op in ops} == {b"ring"}
    assert plan.counts() == dict(all_reduce=1, all_gather=1, reduce_scatter=1, all_to_all=1, broadcast=1)


@pytest.mark.parametrize("chosen", [RING, NCCL], ids=["ring", "nccl"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_on_gpus_no_kernel_is_given_a_dtype_that_it_refuses(dtype, chosen):
    """All-reduces of bfloat16 and int32 are refused on GPUs by the ring as by NCCL; NCCL's path knows no bfloat16 at all."""
    with pretended_gpus(are_whole=chosen is NCCL):
        ops, plan = emitted(every_op(dtype), chosen)
    assert {op.get_attr("communication_hint") for op in ops} == {chosen.hint.encode()}
    assert {op.get_attr("timeout_seconds") for op in ops} == {TIMEOUT_SECONDS}
    reduced = {tf.bfloat16: tf.float32, tf.int32: tf.int64}.get(dtype, dtype)
    moved = tf.float16 if dtype == tf.bfloat16 else dtype
    is_reduce_scatter = chosen is NCCL and dtype.size != 2  # else an all-to-all of what the receiver sums
    dtypes = {
        "all_reduce": reduced,
        "all_gather": moved,
        "reduce_scatter": reduced if is_reduce_scatter else moved,
        "all_to_all": moved,
        "broadcast": reduced if chosen is NCCL else moved,
    }
    assert {record.op: record.dtype for record in plan.records[0]} == {op: wire.name for op, wire in dtypes.items()}
    kernel_dtypes = {
        "CollectiveReduceV2": reduced,
        "CollectiveGatherV2": moved,
        "CollectiveAllToAllV2": moved,
    }
    kernel_dtypes |= {"CollectiveBcastSendV2": moved, "CollectiveBcastRecvV2": moved} if chosen is RING else {}
    kernel_dtypes |= {"CollectiveReduceScatterV2": reduced} if is_reduce_scatter else {}
    assert {op.type: op.get_attr("T") for op in ops} == kernel_dtypes


@pytest.mark.parametrize("n", [exhaustive(2), 3])
def test_the_ring_of_gpus_computes_what_that_of_cpus_does(n, monkeypatch):
    """Run on CPUs: 37 and 2 x 3 numbers do not divide by the ranks; the all-reduce in two messages has a lower limit of none."""
    monkeypatch.setattr(kernels, "_TWO_MESSAGES_FROM_BYTES", 0)
    rng = np.random.default_rng(n)
    values = [{dtype.name: (integers(rng, (37,), dtype), integers(rng, (n, 2, 3), dtype)) for dtype in DTYPES} for _ in range(n)]

    def rank(x):
        outputs = {}
        for name, (vector, rows) in x.items():
            lowest, highest = all_reduce(vector, reduce_op="min"), all_reduce(vector, reduce_op="max")
            moved = all_gather(vector), all_to_all(rows), broadcast(vector, root=1)
            outputs[name] = all_reduce(vector), lowest, highest, reduce_scatter(rows), *moved
        return outputs

    expected = run(strategy_on(n), rank, values)
    with pretended_gpus(are_whole=False):
        strategy = strategy_on(n)
        found = run(strategy, rank, values)
    assert [record.dtype for record in strategy.last_plan.records[0] if record.op == "all_reduce"].count("bfloat16") == 0
    assert "all_reduce/scatter" in {record.label for record in strategy.last_plan.records[0]}
    for mine, others in zip(found, expected, strict=True):
        for name in mine:
            for one, other in zip(mine[name], others[name], strict=True):
                np.testing.assert_array_equal(one, other, err_msg=name)


class NcclOnCpus(kernels.Nccl):
    """What `Nccl` emits, with kernels that run on CPUs: right for all but its reduce-scatters, of which the ring has none."""

    hint = "ring"


SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1 / 3, -1e4])


def some_of(dtype):
    """Numbers of `dtype`, of which no bit may change on the way."""
    return tf.cast(SPECIAL if dtype.is_floating else [0, 1, 100, 7], dtype)


def bits(x):
    return np.asarray(x).tobytes()


def test_what_is_received_is_what_was_sent():
    """To the bit, though with NCCL it travels as a sum: a receiver's negative zeros are added to it."""
    sent = {dtype.name: some_of(dtype) for dtype in (*DTYPES, tf.bool, tf.uint8, tf.int8)}
    messages = OrderedMessages("ring")

    def rank(x):
        program, received = current_program(), {}
        for name, value in x.items():
            mine = value if program.rank == 1 else tf.zeros_like(value)
            received[name] = [broadcast(mine, root=1)] if value.dtype in DTYPES else []
            if program.rank == 1:
                messages.send(program, value, 0, name)
                received[name].append(value)
            else:
                spec = tf.TensorSpec(value.shape, value.dtype)
                received[name].append(messages.receive(program, spec, tf.constant(0), 1, name))
        return received

    with pretended_gpus(are_whole=True):
        strategy = strategy_on(2)
        strategy.extended.communicator = Communicator(strategy.mesh, NcclOnCpus())
        found = run(strategy, rank, [sent, sent])
    records = strategy.last_plan.records[0]
    assert {record.op for record in records} == {"broadcast", "send"}
    # As all-reduces of two: everybody sends all of it.
    assert strategy.last_plan.sent_bytes(0) == strategy.last_plan.sent_bytes(1) == sum(record.input_bytes for record in records)
    for name, value in sent.items():
        assert {bits(one) for one in (*found[0][name], *found[1][name])} == {bits(value)}, name


@pytest.mark.parametrize("length", [3000, None], ids=["known length", "unknown length"])
def test_half_precision_is_summed_in_single_on_gpus(length, monkeypatch):
    """256 + 1 + 1 is 258 in float32 and 256 when it is added in bfloat16 one by one; one rounding, and half the bytes."""
    monkeypatch.setattr(kernels, "_TWO_MESSAGES_FROM_BYTES", 2 * 3000)
    parts = [np.full([3000], value, tf.bfloat16.as_numpy_dtype) for value in (256, 1, 1)]

    def rank(x):
        summand = x if length else tf.boolean_mask(x, x < 1000)
        program = current_program("a test")
        return activations.all_reduce(program, summand, "data", "sum"), reduce_scatter(x)

    with pretended_gpus(are_whole=True):
        strategy = strategy_on(3)
        strategy.extended.communicator = Communicator(strategy.mesh, NcclOnCpus())
        results = run(strategy, rank, parts)
    for whole, part in results:
        assert set(whole.astype("float32")) == {258.0}
        assert set(part.astype("float32")) == {258.0} and part.shape == (1000,)
    records = strategy.last_plan.records[0]
    assert [(record.op, record.dtype) for record in records] == [
        ("reduce_scatter", "float16"),
        ("all_gather", "float16"),
        ("reduce_scatter", "float16"),
    ]
    if length:
        assert sum(record.sent_bytes for record in records[:2]) == 2 * 2 * 3000 * 2 / 3


@pytest.mark.parametrize("is_one_process", [True, False])
def test_nccl_exchanges_within_a_process_only(is_one_process):
    """TensorFlow's NCCL all-to-all counts the members of its own process: between processes the reduce-scatter is NCCL's own."""
    mesh, ranks = strategy_on(3).mesh, (0, 1, 2)
    communicator = Communicator(mesh, NCCL, None if is_one_process else [1])
    communicator.member_orders[ranks] = [0, 1, 2]
    with pretended_gpus(are_whole=True), tf.Graph().as_default() as graph:
        program = RankProgram(communicator, 1, graph, communicator.new_plan())
        big = tf.ones([2**20], tf.bfloat16)
        group_ops.reduce_scatter(program, tf.ones([3, 5], tf.bfloat16), ranks, "gradients", dtype=tf.float32)
        group_ops.all_reduce(program, big, ranks, "sum", "activations")
        group_ops.all_to_all(program, tf.ones([3, 5]), ranks, "rows")
        types = [op.type for op in graph.get_operations() if op.type.startswith("Collective")]
    records = [(record.op, record.dtype) for record in program.plan.records[1]]
    if is_one_process:
        assert types == ["CollectiveAllToAllV2", "CollectiveAllToAllV2", "CollectiveGatherV2", "CollectiveAllToAllV2"]
        assert records == [
            ("reduce_scatter", "float16"),
            ("reduce_scatter", "float16"),
            ("all_gather", "float16"),
            ("all_to_all", "float32"),
        ]
    else:
        assert types == ["CollectiveReduceScatterV2", "CollectiveReduceV2", "CollectiveGatherV2"]
        assert records == [("reduce_scatter", "float32"), ("all_reduce", "float32"), ("all_gather", "float32")]


def test_nccl_gathers_of_unknown_length_have_a_gradient():
    def rank(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            gathered = all_gather(x)
        return tape.gradient(gathered, x)

    ops, plan = emitted(rank, NCCL, tf.TensorSpec([None, 3]))
    assert [record.op for record in plan.records[0]] == ["all_gather", "all_gather", "reduce_scatter"]
    assert sum(op.type == "CollectiveReduceScatterV2" for op in ops) == 2


def test_each_rank_has_its_device_and_token():
    ops, _ = emitted(every_op(tf.float32), RING)
    tokens = {}
    for op in ops:
        if op.type != "CollectiveBcastSendV2" and op.type != "CollectiveBcastRecvV2":
            (token,) = [tensor for tensor in op.inputs if tensor.dtype == tf.resource]
            tokens.setdefault(op.device, set()).add(token.name)
    assert len(tokens) == 2
    assert all(len(names) == 1 for names in tokens.values())
    assert len(set.union(*tokens.values())) == 2
