"""What the kernels get wrong in large groups, in a process of its own: the number of devices is fixed at the start."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]

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
