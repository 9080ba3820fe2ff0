"""What the transports of TensorFlow's kernels emit. GPUs are pretended: NCCL programs are traced and looked at, never run."""

import pytest
import tensorflow as tf
from ranks import strategy_on, trace

from tfdist.collectives import (
    NCCL,
    RING,
    Communicator,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from tfdist.collectives.transports.kernel_settings import TIMEOUT_SECONDS, byte_dtype

pytestmark = pytest.mark.timeout(120)

DTYPES = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def test_their_hints():
    assert (RING.hint, NCCL.hint) == ("ring", "nccl")


def test_reduction_dtypes():
    assert [RING.reduction_dtype(dtype) for dtype in DTYPES] == list(DTYPES)
    wide = {tf.bfloat16: tf.float32, tf.int32: tf.int64}
    assert [NCCL.reduction_dtype(dtype) for dtype in DTYPES] == [wide.get(dtype, dtype) for dtype in DTYPES]


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


@pytest.mark.parametrize(("dtype", "reduced"), [(tf.bfloat16, tf.float32), (tf.int32, tf.int64), (tf.float32, tf.float32)])
def test_nccl_is_asked_for(dtype, reduced):
    ops, plan = emitted(every_op(dtype), NCCL)
    by_type = {op.type: op for op in ops}
    assert {op.get_attr("communication_hint") for op in ops} == {b"nccl"}
    assert {op.get_attr("timeout_seconds") for op in ops} == {TIMEOUT_SECONDS}
    assert sum(op.type == "CollectiveReduceScatterV2" for op in ops) == 2
    for reduction in ("CollectiveReduceV2", "CollectiveReduceScatterV2"):
        assert by_type[reduction].inputs[0].dtype == reduced
    carried = tf.float16 if dtype == tf.bfloat16 else dtype
    assert by_type["CollectiveGatherV2"].inputs[0].dtype == carried
    assert by_type["CollectiveBcastSendV2"].inputs[0].dtype == carried
    assert [record.dtype for record in plan.records[0]] == [
        dtype.name if record.op == "all_to_all" else reduced.name if "reduce" in record.op else carried.name
        for record in plan.records[0]
    ]


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
