"""Tensor-parallel models against the same layers on one device: losses, metrics, weights, slots, predictions."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from ranks import strategy_on
from training import one_device

import tfdist
from tests import workers
from tests.extensions.tensor import tensor_models
from tests.extensions.tensor.tensor_models import BATCH, LENGTH, train
from tests.parity.comparison import assert_same_tree

layers = tfdist.layers
pytestmark = [pytest.mark.as_traced, pytest.mark.usefixtures("float64")]


@functools.cache
def on_one_device(name, optimizer=None, infers=False):
    return train(one_device(), name, OPTIMIZERS.get(optimizer), infers)


def assert_is_one_device(found, name, optimizer=None):
    assert_same_tree(found, on_one_device(name, optimizer, infers="predict" in found))


def mesh(tensor, data, **settings):
    return strategy_on(tensor * data, tensor_parallel_size=tensor, **settings)


# (model, tensor size, data size, stage). Four tensor ranks, other stages and meshes: in loops of one's own, with the optimizers
# below and in workers.
GRID = [
    exhaustive("dense", 2, 2, 0),
    exhaustive("dense", 2, 2, 1),
    exhaustive("dense", 4, 1, 0),
    exhaustive("transformer", 2, 2, 0),
    exhaustive("transformer", 2, 2, 1),
    exhaustive("transformer", 2, 2, 2),
    exhaustive("transformer", 2, 2, 3),
    exhaustive("transformer", 4, 1, 0),
    exhaustive("transformer", 4, 1, 1),
    exhaustive("sequence parallel", 2, 2, 3),  # one like it runs in tests/extensions/pipeline/test_parity.py
    exhaustive("sequence parallel", 4, 1, 0),
    exhaustive("sequence parallel, grouped queries", 2, 1, 1),
    ("grouped queries, gated", 2, 2, 2),
    exhaustive("grouped queries, gated", 4, 1, 3),
    exhaustive("tied", 2, 2, 3),
    exhaustive("tied", 4, 1, 0),
]


@pytest.mark.parametrize(("name", "tensor", "data", "zero_stage"), GRID)
def test_parity(name, tensor, data, zero_stage):
    found = train(mesh(tensor, data, zero_stage=zero_stage), name, infers=zero_stage == 0)
    assert_is_one_device(found, name)


@pytest.mark.parametrize(
    ("name", "tensor", "data", "zero_stage"), [exhaustive("transformer", 2, 2, 3), ("tied", 2, 2, 3), ("dense", 4, 1, 1)]
)
def test_a_custom_loop(name, tensor, data, zero_stage):
    found = tensor_models.custom_loop(mesh(tensor, data, zero_stage=zero_stage), name)
    assert_same_tree(found, tensor_models.custom_loop(one_device(), name))


def test_a_batch_counts_once_in_what_is_logged():
    """Tensor peers see the same examples."""
    features = np.random.default_rng(1).normal(size=(12, 3))
    labels = (features[:, :1] > 0).astype("float64")

    def counts(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            shard = [layers.ColumnParallelDense(4), layers.RowParallelDense(1, activation="sigmoid")]
            model = keras.Sequential([keras.Input((3,)), *shard])
            metrics = [keras.metrics.TruePositives(name="hits"), keras.metrics.FalsePositives(name="misses")]
            model.compile("sgd", "mse", metrics=metrics)
        logged = []
        record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: logged.append(dict(logs)))
        model.fit(features, labels, batch_size=6, verbose=0, callbacks=[record])
        return np.array([(logs["hits"], logs["misses"]) for logs in logged], float)

    expected = counts(one_device())
    assert expected.sum() > 0
    np.testing.assert_array_equal(counts(mesh(2, 2, zero_stage=1)), expected)


SGD = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
OPTIMIZERS = {
    "clipped by norm, loss scaled": lambda: keras.optimizers.LossScaleOptimizer(SGD(clipnorm=0.05)),
    "clipped by global norm": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1),
    "averaged, accumulated": lambda: SGD(
        use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2, gradient_accumulation_steps=2
    ),
    "whole-tensor": lambda: keras.optimizers.Adafactor(0.05),
    "orthogonalized": lambda: keras.optimizers.Muon(0.01, exclude_layers=["last"]),
}


@pytest.mark.parametrize(
    ("optimizer", "tensor", "data", "zero_stage"),
    [
        exhaustive("clipped by norm, loss scaled", 2, 2, 1),
        exhaustive("clipped by norm, loss scaled", 2, 2, 3),
        ("clipped by norm, loss scaled", 4, 1, 0),
        ("clipped by global norm", 2, 2, 3),
        exhaustive("averaged, accumulated", 2, 2, 1),  # in a pipeline and without, too
        exhaustive("averaged, accumulated", 2, 1, 0),
        exhaustive("whole-tensor", 2, 2, 0),
        exhaustive("whole-tensor", 2, 2, 2),
        ("orthogonalized", 2, 2, 3),
    ],
)
def test_what_an_optimizer_is_asked_for(optimizer, tensor, data, zero_stage):
    found = train(mesh(tensor, data, zero_stage=zero_stage), "pair", OPTIMIZERS[optimizer])
    assert_is_one_device(found, "pair", optimizer)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cases",
    [
        exhaustive([("pair", 1), ("sequence parallel, grouped queries", 3)]),
        exhaustive([("transformer", 0), ("dense", 2), ("sequence parallel", 3)]),
    ],
    ids=str,
)
def test_four_workers(cases, tmp_path):
    """A mesh of 2 x 2 over four processes: models, and the stages of every worker's strategy."""
    with workers.job(tmp_path, 4, "tests.extensions.tensor.tensor_worker_cases:train_all", cases) as job:
        for name, stage in cases:
            on_one_device(name, infers=stage == 0)  # while they start
        for found in job.results(280):
            assert list(found) == cases
            for (name, _), result in found.items():
                assert_is_one_device(result, name)


# Counting


def counts_of(strategy, model, features, static=True):
    """Returns the plan of one training step of `model`, and the labels of the collectives over the tensor axis."""
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
    rows = tf.ones((BATCH, *features), tf.float64)
    with strategy.scope():
        first = keras.Variable(np.ones((BATCH, *features)), name="input")

    @tf.function
    def step():
        def on_rank():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(rows * tf.convert_to_tensor(first), training=True))
            return tape.gradient(loss, [v.value for v in [first, *model.trainable_variables]])[0]

        return strategy.run(on_rank)

    step.get_concrete_function()
    return [record for record in strategy.last_plan.records[0] if len(record.ranks) == strategy.mesh.tensor_parallel_size]


def blocks():
    return {
        "mlp": lambda: layers.ParallelMLP(16),
        "gated mlp": lambda: layers.ParallelMLP(16, gated=True),
        "attention": lambda: SelfAttention(layers.ParallelMultiHeadAttention(4, 3)),
        "grouped attention": lambda: SelfAttention(layers.ParallelGroupedQueryAttention(3, 4, 4)),
    }


class SelfAttention(keras.layers.Layer):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x, use_causal_mask=True)


@pytest.mark.parametrize("name", blocks())
def test_one_all_reduce_forward_and_one_backward(name):
    strategy = mesh(2, 1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((LENGTH, 12)), blocks()[name]()])
    records = counts_of(strategy, model, (LENGTH, 12))
    assert [record.op for record in records] == ["all_reduce", "all_reduce"]
    assert {record.shape for record in records} == {(BATCH, LENGTH, 12)}
    assert records[1].label.endswith("/gradient")


def test_sequence_parallelism_moves_the_bytes_of_the_all_reduces():
    totals = {}
    for is_sharded in (False, True):
        strategy = mesh(2, 1)
        ends = {"input_is_parallel": True, "gather_output": False} if is_sharded else {}
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((LENGTH, 12)),
                    layers.ParallelTransformerBlock(
                        4, 16, sequence_parallel=is_sharded, **ends, use_bias=False, normalization="rms"
                    ),
                ]
            )
        features = (LENGTH // 2 if is_sharded else LENGTH, 12)
        records = counts_of(strategy, model, features)
        activations = [record for record in records if not record.label.endswith(("weights/gradient", "gather_output"))]
        totals[is_sharded] = sum(record.sent_bytes for record in activations)
        assert {record.op for record in activations} == ({"all_gather", "reduce_scatter"} if is_sharded else {"all_reduce"})
    assert totals[True] == totals[False]


def test_the_loss_moves_numbers_per_position_not_per_class():
    for classes in (8, 800):
        strategy = mesh(2, 1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((LENGTH, 12)), layers.ColumnParallelDense(classes, gather_output=False)])
        loss = layers.VocabParallelCrossentropy(from_logits=True, reduction="sum")
        labels, rows = tf.ones((BATCH, LENGTH), tf.int32), tf.ones((BATCH, LENGTH, 12), tf.float64)

        @tf.function
        def step(strategy=strategy, model=model, loss=loss, rows=rows, labels=labels):
            def on_rank():
                with tf.GradientTape() as tape:
                    value = loss(labels, model(rows, training=True))
                tape.gradient(value, [v.value for v in model.trainable_variables])
                return value

            return strategy.run(on_rank)

        step.get_concrete_function()
        shapes = [record.shape for record in strategy.last_plan.records[0]]
        assert shapes == [(BATCH, LENGTH), (BATCH, LENGTH, 2)], classes


# Memory


@pytest.mark.parametrize(("tensor", "data", "zero_stage"), [(2, 2, 0), (2, 2, 1), (2, 2, 3), (4, 1, 3)])
def test_bytes_of_cut_weights(tensor, data, zero_stage):
    strategy = mesh(tensor, data, zero_stage=zero_stage)
    with strategy.scope():
        model = keras.Sequential([keras.Input((16,)), layers.ColumnParallelDense(32, gather_output=False, name="up")])
        model.compile(keras.optimizers.Adam(), "mse")
        model.optimizer.build(model.trainable_variables)
    weights = 16 * 32 + 32
    report = tfdist.memory_report(model)
    sharded = {0: (1, 1, 1), 1: (1, 1, data), 3: (data, data, data)}[zero_stage]
    for memory in report.devices:
        assert memory.parameter_bytes == 8 * weights // tensor // sharded[0]
        assert memory.gradient_bytes == 8 * weights // tensor // sharded[1]
        slots = 2 * 8 * weights // tensor // sharded[2]
        assert 0 <= memory.optimizer_bytes - slots <= 16  # and the step and the learning rate
