"""Messages that are cut; and what the kernels get wrong in large groups, in a process of its own, whose devices are its own."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from ranks import integers, run, strategy_on

from tfdist.collectives import RING, all_gather, all_reduce, choose_transport, reduce_scatter
from tfdist.collectives.transports import Chunked

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


@pytest.mark.parametrize("chunk_bytes", [4, 8, 40, 1000])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_large_messages_are_cut(num_ranks, chunk_bytes):
    """The same values, in as many messages as it takes, none of more than `chunk_bytes` to one peer at once."""
    rng = np.random.default_rng(0)
    values = [integers(rng, (num_ranks, 7, 3)) for _ in range(num_ranks)]
    strategy = strategy_on(num_ranks)
    communicator = strategy.extended.communicator
    communicator.transport = Chunked(communicator.transport, chunk_bytes)

    def on_rank(x):
        reduced, scattered, gathered = all_reduce(x), reduce_scatter(x), all_gather(x[0])
        return {"all_reduce": reduced, "reduce_scatter": scattered, "all_gather": gathered}

    results = run(strategy, on_rank, values)
    total = sum(values)
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result["all_reduce"], total)
        np.testing.assert_array_equal(result["reduce_scatter"], total[rank : rank + 1])
        np.testing.assert_array_equal(result["all_gather"], np.concatenate([value[0] for value in values]))
    sizes = {"all_reduce": [], "reduce_scatter": [], "all_gather": []}
    for record in strategy.last_plan.records[0]:
        per_peer = 1 if record.op == "all_gather" else num_ranks
        sizes[record.op].append(int(np.prod(record.shape)) * 4 / per_peer)
    for op, found in sizes.items():
        assert sum(found) == pytest.approx(21 * 4), op
        assert max(found) <= max(chunk_bytes, 4), op
        assert len(found) == -(-21 * 4 // chunk_bytes), op


def test_only_messages_between_processes_are_cut():
    devices = ["/job:worker/task:0/device:CPU:0", "/job:worker/task:1/device:CPU:0"]
    between_workers = choose_transport(devices, is_multi_worker=True)
    assert between_workers.chunk_bytes == 8 * 2**20 and between_workers.inner is RING
    assert choose_transport(devices) is RING
