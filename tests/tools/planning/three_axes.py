"""A rank alone on a mesh of three axes: a program of its own, since it needs eight devices."""

import numpy as np
import tensorflow as tf
from test_planned_memory import LOSS, text

import tfdist
from tests.tools.planning.spreading import spread
from tfdist.tools.planning import Candidate
from tfdist.tools.planning.rank_trace import Job, trace_rank
from tfdist.tools.planning.traced_model import trace


def main() -> None:
    devices, traced, rng = tfdist.use_logical_cpus(8), trace(text), np.random.default_rng(0)
    x, y = rng.integers(0, 300, (8, 6)), rng.integers(0, 500, (8, 6))
    for zero_stage in (0, 3):
        candidate = Candidate(zero_stage=zero_stage, data=2, tensor=2, pipeline=2, schedule="1f1b", microbatches=2)
        strategy = tfdist.ShardedStrategy(devices, config=tfdist.ShardingConfig(**candidate.settings()))
        with strategy.scope():
            model = spread(text, candidate)
            model.compile("adam", LOSS)
        model.fit(tf.data.Dataset.from_tensors((x, y)), verbose=0)
        for pipe in range(2):
            alone = trace_rank(Job(text, traced, 8, kind="CPU"), candidate, pipe)
            records, others = alone.plan.records[alone.rank], strategy.last_plan.records[alone.rank]
            assert strategy.mesh.coordinate(alone.rank).pipe == pipe
            assert [one.kind for one in records] == [one.kind for one in others] and records
    print("done")
