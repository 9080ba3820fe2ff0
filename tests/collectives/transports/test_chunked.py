"""Messages that are cut; and what the kernels get wrong in large groups, in a process of its own, whose devices are its own."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from ranks import integers, run, strategy_on

from tfdist.collectives import RING, all_gather, all_reduce, all_to_all, choose_transport, current_program, reduce_scatter
from tfdist.collectives.transports import chunked
from tfdist.collectives.transports.chunked import Chunked

ROOT = pathlib.Path(__file__).parents[3]

PROGRAM = """
import json, sys
import tensorflow as tf
import tfdist
from tfdist.collectives import all_gather, all_reduce, all_to_all, broadcast, current_program, reduce_scatter

n = int(sys.argv[1])
devices = tfdist.use_logical_cpus(n)
assert devices == [f"CPU:{i}" for i in range(n)] and len(tf.config.list_logical_devices("CPU")) == n
strategy = tfdist.ShardedStrategy(devices)

def rank():
    x = tf.range(2 * n) + 100 * current_program().rank
    half = tf.cast(tf.fill([n], 256 if current_program().rank == 0 else 1), tf.bfloat16)
    return {
        "all_reduce": all_reduce(x),
        "all_gather": all_gather(x[:2]),
        "reduce_scatter": reduce_scatter(x),
        "bfloat16": tf.cast(reduce_scatter(half), tf.int32),
        "all_to_all": all_to_all(x),
        "broadcast": broadcast(x[:2], root=n - 1),
    }

@tf.function(autograph=False)
def step():
    return strategy.run(rank)

results = {name: strategy.experimental_local_results(value) for name, value in step().items()}
print(json.dumps({name: [value.numpy().tolist() for value in values] for name, values in results.items()}))
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
def test_twelve_ranks_in_a_fresh_process():
    """AllToAllV2 exchanges the blocks of 1 and 11 with each other, among 12 ranks of one process."""
    n = 12
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(n)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads(process.stdout)
    values = [np.arange(2 * n) + 100 * rank for rank in range(n)]
    for rank in range(n):
        mine = slice(2 * rank, 2 * rank + 2)
        expected = {
            "all_reduce": sum(values),
            "all_gather": np.concatenate([value[:2] for value in values]),
            "reduce_scatter": sum(values)[mine],
            "bfloat16": [268],  # 267, summed in single precision and rounded once
            "all_to_all": np.concatenate([value[mine] for value in values]),
            "broadcast": values[n - 1][:2],
        }
        for name, value in expected.items():
            np.testing.assert_array_equal(results[name][rank], value, err_msg=f"{name} on rank {rank}")


OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def check_moves(strategy, values):
    """Moves `values`, of each rank (N, ...), by each operation; returns the lane and key of each all-to-all kernel of rank 0."""
    kernels = []

    def on_rank(x):
        found = {"all_reduce": all_reduce(x), "reduce_scatter": reduce_scatter(x), "all_gather": all_gather(x[0])}
        before = len(x.graph.get_operations())
        found |= {"all_to_all": all_to_all(x), "all_to_all again": all_to_all(2 * x)}
        if current_program().rank == 0:
            made = x.graph.get_operations()[before:]
            kernels.extend(one for one in made if one.type == "CollectiveAllToAllV2")
        return found

    results = run(strategy, on_rank, values)
    total = sum(values)
    for rank, result in enumerate(results):
        theirs = np.stack([value[rank] for value in values])
        np.testing.assert_array_equal(result["all_reduce"], total)
        np.testing.assert_array_equal(result["reduce_scatter"], total[rank : rank + 1])
        np.testing.assert_array_equal(result["all_gather"], np.concatenate([value[0] for value in values]))
        np.testing.assert_array_equal(result["all_to_all"], theirs)
        np.testing.assert_array_equal(result["all_to_all again"], 2 * theirs)
    lanes = list(dict.fromkeys(kernel.inputs[-1].name for kernel in kernels))  # their tokens, in the order of the first on each
    return [(lanes.index(kernel.inputs[-1].name), int(tf.get_static_value(kernel.inputs[3]))) for kernel in kernels]


@pytest.mark.parametrize("chunk_bytes", [4, 8, 40, 1000])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_large_messages_are_cut(num_ranks, chunk_bytes):
    """The same values, in as many messages as it takes, none of more than `chunk_bytes` to one peer at once."""
    rng = np.random.default_rng(0)
    strategy = strategy_on(num_ranks)
    communicator = strategy.extended.communicator
    communicator.transport = Chunked(chunk_bytes)
    check_moves(strategy, [integers(rng, (num_ranks, 7, 3)) for _ in range(num_ranks)])
    sizes = {op: [] for op in OPS}
    for record in strategy.last_plan.records[0]:
        per_peer = 1 if record.op == "all_gather" else num_ranks
        sizes[record.op].append(int(np.prod(record.shape)) * 4 / per_peer)
    for op, found in sizes.items():
        messages = 2 if op == "all_to_all" else 1
        assert sum(found) == pytest.approx(messages * 21 * 4), op
        assert max(found) <= max(chunk_bytes, 4), op
        assert len(found) == messages * -(-21 * 4 // chunk_bytes), op


@pytest.mark.parametrize("elements", [7, 33, 100])
def test_pieces_are_on_their_way_at_once(elements):
    """Pieces take four lanes in turns, whichever message they are of; two that are under way at once have two keys."""
    strategy = strategy_on(2)
    communicator = strategy.extended.communicator
    communicator.transport = Chunked(64)
    kernels = check_moves(strategy, [integers(np.random.default_rng(1), (2, elements)) for _ in range(2)])
    pieces = -(-elements * 4 // 64)
    assert strategy.last_plan.counts() == {op: pieces * (2 if op == "all_to_all" else 1) for op in OPS}
    assert [lane for lane, _ in kernels] == [number % chunked.LANES for number in range(2 * pieces)]
    for first in range(2 * pieces):
        under_way = [key for _, key in kernels[first : first + chunked.LANES]]
        assert len(set(under_way)) == len(under_way)


def test_what_has_a_size_at_run_time_only_comes_one_after_the_other():
    """Its keys say nothing of lanes."""
    strategy = strategy_on(2)
    communicator = strategy.extended.communicator
    communicator.transport = Chunked(64)
    found = []

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.float32)])
    def step(x):
        def on_rank(x):
            moved = [all_gather(x, uneven=True), all_gather(2 * x, uneven=True)]
            if current_program().rank == 0:
                gathers = [one for one in x.graph.get_operations() if one.type == "CollectiveGatherV2"]
                found.extend(one.inputs[-1].name for one in gathers if one.inputs[0].shape[0] is None)
            return moved

        return strategy.run(on_rank, (x,))

    for value, expected in zip(step(tf.range(50.0)), (1, 2), strict=True):
        np.testing.assert_array_equal(strategy.experimental_local_results(value)[1], expected * np.tile(np.arange(50.0), 2))
    assert len(found) == 2 and len(set(found)) == 1


def test_only_messages_between_processes_are_cut():
    devices = ["/job:worker/task:0/device:CPU:0", "/job:worker/task:1/device:CPU:0"]
    between_workers = choose_transport(devices, is_multi_worker=True)
    assert between_workers.chunk_bytes == 2 * 2**20
    assert choose_transport(devices) is RING
