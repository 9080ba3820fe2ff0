"""Planned traffic against what the plan of a real step counts, to the byte, by axis of the mesh.

In tests the default `group_bytes` gathers each layer alone; other sizes gather layers together.
"""

import functools

import keras
import numpy as np
import pytest
from test_planned_memory import BLOCKS, LOSS, mixed, text, traced
from training import JoinedWeights, mlp

import tfdist
from tests.devices import names
from tests.tools.planning.spreading import spread
from tfdist.tools.planning import Candidate
from tfdist.tools.planning.sent_bytes import sent_of


class Table(keras.layers.Layer):
    """An embedding, and called on what is no tokens the output layer with the same weights."""

    def build(self, shape):
        self.table = self.add_weight(shape=(301, 32))

    def call(self, x):
        is_tokens = "int" in keras.backend.standardize_dtype(x.dtype)
        return keras.ops.take(self.table, x, axis=0) if is_tokens else keras.ops.matmul(x, keras.ops.transpose(self.table))


def tied():
    tokens, table = keras.Input((6,), dtype="int32"), Table()
    x = table(tokens)
    for size in (48, 64, 32):
        x = keras.layers.Dense(size, "relu")(x)
    model = keras.Model(tokens, table(x))
    model.compile("adam", LOSS)
    return model


def joined():
    layers = [JoinedWeights(), JoinedWeights(), JoinedWeights(), keras.layers.Dense(7)]
    model = keras.Sequential([keras.Input((15,)), *layers])
    model.compile("adam", LOSS)
    return model


RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 7, 8)
DATA = {
    mlp: (RNG.normal(size=(8, 15)).astype("float32"), LABELS),
    joined: (RNG.normal(size=(8, 15)).astype("float32"), LABELS),
    mixed: (RNG.normal(size=(8, 15)).astype("float32"), LABELS),
    text: (RNG.integers(0, 300, (8, 6)), RNG.integers(0, 500, (8, 6))),
    tied: (RNG.integers(0, 301, (8, 6)), RNG.integers(0, 301, (8, 6))),
    BLOCKS: (RNG.normal(size=(8, 160)).astype("float32"), LABELS),
}
EXHAUSTIVE = pytest.mark.exhaustive


ALONE, GROUPS = (tfdist.ShardingConfig(group_bytes=size) for size in (0, 150_000))


@functools.cache
def strategy_of_a_step(build, candidate, config=ALONE):
    """Returns the strategy that has made a step of `fit`."""
    settings = {
        "tensor_parallel_size": candidate.tensor,
        "pipeline_parallel_size": candidate.pipeline,
        "sharding_group_size": candidate.sharding_group_size,
        "gradient_compression": candidate.gradient_compression,
        "parameter_compression": candidate.parameter_compression,
    }
    strategy = tfdist.ShardedStrategy(names(candidate.devices), config=config, zero_stage=candidate.zero_stage, **settings)
    with strategy.scope():
        model = spread(build, candidate)
        model.compile("adam", LOSS)
    model.fit(*DATA[build], batch_size=8, epochs=1, verbose=0)
    return strategy


def counted(build, candidate, config=ALONE):
    """Returns the bytes that rank 0 sends in a step of `fit`, by the axis that its groups lie on."""
    strategy = strategy_of_a_step(build, candidate, config)
    plan, mesh = strategy.last_plan, strategy.mesh
    assert plan.sent_bytes() > 0
    sent = dict.fromkeys(("data", "tensor", "pipe"), 0.0)
    axes = {mesh.group_ranks(axis, 0): axis for axis in ("pipe", "tensor", "data")}
    axes |= {mesh.group_ranks(axis, 0): "data" for axis in ("shard", "replicate") if mesh.is_hybrid}
    for record in plan.records[0]:
        sent[axes[record.ranks]] += record.sent_bytes
    assert sum(sent.values()) == plan.sent_bytes()
    return sent


@pytest.mark.parametrize(
    "build, zero_stage, data",
    [
        (mixed, 0, 2),
        pytest.param(mixed, 1, 4, marks=EXHAUSTIVE),
        pytest.param(mixed, 3, 2, marks=EXHAUSTIVE),
        pytest.param(mlp, 2, 4, marks=EXHAUSTIVE),
        (mlp, 3, 2),
        pytest.param(text, 1, 2, marks=EXHAUSTIVE),
        pytest.param(text, 3, 4, marks=EXHAUSTIVE),
        pytest.param(BLOCKS, 3, 4, marks=EXHAUSTIVE),
        pytest.param(tied, 3, 2, marks=EXHAUSTIVE),
        pytest.param(joined, 3, 2, marks=EXHAUSTIVE),
    ],
)
def test_bytes_over_replicas(build, zero_stage, data):
    candidate = Candidate(zero_stage=zero_stage, data=data)
    for config in (ALONE, GROUPS) if zero_stage == 3 else (ALONE,):
        assert sent_of(traced(build), candidate, 8, config=config) == counted(build, candidate, config)


def test_the_gradient_of_a_table_that_is_read_in_two_gathers_is_reduced_twice():
    sent = [sent_of(traced(tied), Candidate(zero_stage=stage, data=2), 8, config=ALONE)["data"] for stage in (2, 3)]
    weights = [weight.bytes for weight in traced(tied).weights]
    # Gathered for both reads, for backward where it is the output layer but kept from forward, and reduced twice; biases are not
    # gathered again.
    biases = 4 * (48 + 64 + 32)
    assert sent[1] - sent[0] == (sum(weights) - biases + weights[0]) / 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", [ALONE, GROUPS])
def test_bytes_of_what_recomputation_reads_again(config):
    """Biases, too, but for that of a block's last product, which is what the block returns."""
    candidate = Candidate(zero_stage=3, data=2, recompute=True)
    planned = sent_of(traced(BLOCKS), candidate, 8, config=config)
    assert planned == counted(BLOCKS, candidate, config)
    assert planned["data"] > sent_of(traced(BLOCKS), Candidate(zero_stage=3, data=2), 8, config=config)["data"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bytes_of_compressed_messages(zero_stage):
    given = {"parameter_compression": "int8"} if zero_stage else {}
    candidate = Candidate(zero_stage=zero_stage, data=2, gradient_compression="int8", **given)
    assert sent_of(traced(text), candidate, 8, config=ALONE) == counted(text, candidate)


@pytest.mark.exhaustive
@pytest.mark.parametrize("compression", [None, "int8"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_bytes_in_sharding_groups(zero_stage, compression):
    candidate = Candidate(zero_stage=zero_stage, data=4, sharding_group_size=2, gradient_compression=compression)
    assert sent_of(traced(text), candidate, 8, config=ALONE) == counted(text, candidate)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage, data", [(0, 1), (3, 2)])
def test_bytes_over_tensor_ranks(zero_stage, data):
    candidate = Candidate(zero_stage=zero_stage, data=data, tensor=2)
    assert sent_of(traced(text), candidate, 8, config=ALONE) == counted(text, candidate)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage, data", [(0, 1), (2, 2), (3, 2)])
def test_bytes_over_a_pipeline(zero_stage, data):
    """What passes between stages of one process is no message: it is an edge of the graph."""
    candidate = Candidate(zero_stage=zero_stage, data=data, pipeline=2, schedule="1f1b", microbatches=4)
    planned, found = sent_of(traced(BLOCKS), candidate, 8), counted(BLOCKS, candidate)
    passed = (8 // data) * 160 * 4
    assert planned["data"] == found["data"] and planned["pipe"] == passed + found["pipe"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule, stages_per_rank", [("1f1b", 1), ("interleaved", 2)])
def test_bytes_over_tensor_ranks_of_a_pipeline(schedule, stages_per_rank):
    """A rank sends what the layers of its own stages send."""
    sizes = {"tensor": 2, "pipeline": 2, "microbatches": 4, "stages_per_rank": stages_per_rank}
    candidate = Candidate(zero_stage=0, schedule=schedule, **sizes)
    planned, found = sent_of(traced(text), candidate, 8), counted(text, candidate)
    assert planned["tensor"] == found["tensor"] > 0 and planned["data"] == found["data"] == 0
    assert planned["tensor"] < sent_of(traced(text), Candidate(zero_stage=0, tensor=2), 8)["tensor"]


def test_a_compiled_model_is_needed_by_none():
    """Of a model that is not compiled, the traffic is that of the same model."""
    bare = traced(lambda: keras.models.clone_model(mlp()))
    assert sent_of(bare, Candidate(data=2), 8) == sent_of(traced(mlp), Candidate(data=2), 8)
