"""Recomputation beside all else that a strategy and a model have: tensor ranks, pipelines, half precision, frozen blocks."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparing import assert_as_on_one_device, run
from grids import exhaustive
from training import one_device, strategy_for

import tfdist
from tests.devices import is_on
from tests.parity.comparison import assert_same_tree, state
from tests.programs.test_recomputation import (
    CLASSES,
    LENGTH,
    WIDTH,
    Block,
    X,
    Y,
    ancestors,
    compiled,
    head,
    is_backward,
    kept_within_blocks,
    recomputes,
    stack,
    trained,
)

pytestmark = [pytest.mark.as_traced]

TOKENS = np.random.default_rng(6).integers(0, 7, (len(Y), 6))
NEXT = np.random.default_rng(7).integers(0, 8, (len(Y), 6))


def recomputed(strategy, model, layers="block"):
    return tfdist.recompute(model, layers) if recomputes(strategy) else model


def parallel_blocks(strategy, **settings):
    """Messages between tensor ranks within the blocks, forward and backward."""
    with strategy.scope():
        blocks = [tfdist.layers.ParallelTransformerBlock(2, 10, name=f"block_{k}", **settings) for k in range(2)]
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                tfdist.layers.VocabParallelEmbedding(7, WIDTH, mask_zero=True),
                *blocks,
                tfdist.layers.ColumnParallelDense(8),
            ]
        )
        compiled(recomputed(strategy, model))
    history = model.fit(TOKENS, NEXT, batch_size=8, shuffle=False, verbose=0).history
    return history, state(model), model.evaluate(TOKENS, NEXT, batch_size=8, verbose=0)


def lean_blocks(strategy):
    return parallel_blocks(strategy, normalization="rms", gated=True, use_bias=False, num_key_value_heads=1)


def sequence_parallel_blocks(strategy):
    return parallel_blocks(strategy, sequence_parallel=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", [parallel_blocks, lean_blocks, sequence_parallel_blocks])
@pytest.mark.parametrize(("devices", "zero_stage"), [(2, 0), (4, 3), (4, 1)])
def test_tensor_ranks(float64, program, devices, zero_stage):
    assert_as_on_one_device(program, zero_stage, devices, tensor_parallel_size=2)


def frozen(strategy):
    with strategy.scope():
        model = recomputed(strategy, stack(*(Block(statistics=k == 1, name=f"block_{k}") for k in range(3))))
        found = []
        for trains in ((True, False, True), (False, False, True), (True, True, True)):
            for k, one in enumerate(trains):
                model.get_layer(f"block_{k}").trainable = one
            found.append(compiled(model).fit(X, Y, batch_size=8, shuffle=False, verbose=0).history)
    return found, state(model)


def clipped(strategy):
    with strategy.scope():
        model = recomputed(strategy, stack(*(Block(statistics=True, name=f"block_{k}") for k in range(2))))
        optimizer = lambda: keras.optimizers.AdamW(  # noqa: E731
            0.01, global_clipnorm=0.1, use_ema=True, gradient_accumulation_steps=2, weight_decay=0.1
        )
        return trained(compiled(model, optimizer, metrics=["accuracy"]))


def shared_between_blocks(strategy):
    """A layer that two blocks use."""
    with strategy.scope():
        first, second = Block(name="block_0"), Block(name="block_1")
        second.mlp = first.mlp
        return trained(compiled(recomputed(strategy, stack(first, second))))


def branches(strategy):
    """Blocks side by side."""
    with strategy.scope():
        inputs = keras.Input((LENGTH, WIDTH))
        x = keras.layers.Dense(WIDTH)(inputs)
        x = keras.layers.Add()([Block(name="block_0")(x), Block(name="block_1")(x), x])
        pooled = head()[0](x)
        other = head()[0](Block(name="block_2")(x))
        model = keras.Model(inputs, [keras.layers.Dense(CLASSES)(pooled), keras.layers.Dense(CLASSES)(other)])
        recomputed(strategy, model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", [loss, loss], loss_weights=[1.0, 0.3])
    history = model.fit(X, [Y, Y], batch_size=8, shuffle=False, verbose=0).history
    return history, state(model)


def one_output_unused(strategy):
    """Backward comes to the blocks of one of two losses only."""
    with strategy.scope():
        inputs = keras.Input((LENGTH, WIDTH))
        x = Block(name="block_0")(keras.layers.Dense(WIDTH)(inputs))
        other = keras.ops.stop_gradient(Block(name="block_1")(x))
        model = keras.Model(inputs, [keras.layers.Dense(CLASSES)(head()[0](y)) for y in (x, other)])
        recomputed(strategy, model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", [loss, loss])
    history = model.fit(X, [Y, Y], batch_size=8, shuffle=False, verbose=0).history
    return history, state(model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@pytest.mark.parametrize("program", [frozen, clipped, shared_between_blocks, branches, one_output_unused])
def test_as_on_one_device(float64, program, zero_stage):
    assert_as_on_one_device(program, zero_stage)


class Small(keras.layers.Layer):
    """A block of a pipeline: with `statistics` every microbatch of its stage has operations of its own."""

    def __init__(self, dropout=0.0, statistics=False, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.out = keras.layers.Dense(11, "gelu"), keras.layers.Dense(WIDTH)
        self.between = [keras.layers.BatchNormalization()] if statistics else []
        self.dropout = keras.layers.Dropout(dropout)

    def call(self, x, training=None):
        y = self.hidden(x)
        for layer in self.between:
            y = layer(y, training=training)
        return keras.ops.sin(x + self.out(self.dropout(y, training=training)))


def half(strategy, is_recomputed, policy, statistics, scale=2.0**17):
    """In float16 the first steps overflow: gradients of both blocks, some on one rank."""
    keras.config.set_dtype_policy(policy)
    try:
        with strategy.scope():
            blocks = [Small(0.4, statistics, name=f"block_{k}") for k in range(2)]  # Keras adds up no losses of half precision
            model = keras.Sequential([keras.Input((WIDTH,)), *blocks, keras.layers.Dense(CLASSES)])
            if is_recomputed:
                tfdist.recompute(model, "block")
            inner = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
            optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale, dynamic_growth_steps=2)
            compiled(model, (lambda: optimizer) if policy == "mixed_float16" else None)
    finally:
        keras.config.set_dtype_policy("float32")
    weights = np.where(np.arange(len(Y)) < 9, 60.0, 1.0)
    scales = []
    scale_of = lambda: float(getattr(model.optimizer, "dynamic_scale", 0.0))  # noqa: E731
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: scales.append(scale_of()))
    arguments = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": [record]}
    history = model.fit(X[:, 0], Y, sample_weight=weights, **arguments).history
    drawn = [variable.numpy() for variable in model.non_trainable_variables]
    return scales, history, state(model), drawn


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision(policy, zero_stage):
    """Bit by bit what it is without recomputation: masks of dropout, statistics and the loss scale, too."""
    kept, again = (run(lambda s, r=r: half(s, r, policy, True), strategy_for(2, zero_stage)) for r in (False, True))
    assert policy != "mixed_float16" or kept[0][0] < 2.0**17 and max(kept[0][1:]) > min(kept[0]), kept[0]
    assert_same_tree(again, kept, rtol=0)


def pipeline(strategy, is_recomputed, dropout=0.0, statistics=False, depth=4, **settings):
    """A model of `depth` blocks in a pipeline; without `settings` the plain one."""
    with strategy.scope():
        blocks = [Small(dropout, statistics, name=f"block_{k}") for k in range(depth)]
        model = keras.Sequential([keras.Input((WIDTH,)), *blocks, keras.layers.Dense(CLASSES)])
        if settings:
            model = tfdist.PipelineModel(model, num_microbatches=2, **settings)
        if is_recomputed:
            tfdist.recompute(model, "block")
        return compiled(model)


def fitted(strategy, is_recomputed, **settings):
    model = pipeline(strategy, is_recomputed, **settings)
    return model.fit(X[:, 0], Y, batch_size=8, shuffle=False, verbose=0).history, state(model)


def dense_blocks(strategy):
    """What two workers run beside one device: `tests.programs.test_over_workers`."""
    return fitted(strategy, recomputes(strategy))


def in_a_pipeline(strategy):
    """What two workers run beside one process."""
    return fitted(strategy, True, dropout=0.3, statistics=True, schedule="zero_bubble")


# (schedule, stages per rank, statistics, ZeRO stage, settings)
PIPELINES = [
    ("zero_bubble", 1, True, 0, {"depth": 2}),
    exhaustive("zero_bubble", 1, True, 0, {}),
    exhaustive("zero_bubble", 1, False, 3, {}),
    exhaustive("1f1b", 1, False, 3, {"reshard_after_microbatch": True}),
    exhaustive("1f1b", 1, True, 3, {}),
    exhaustive("1f1b", 1, False, 0, {"recompute": True}),
    exhaustive("gpipe", 1, True, 0, {"recompute": True}),
    exhaustive("gpipe", 1, False, 1, {}),
    exhaustive("interleaved", 2, True, 3, {"reshard_after_microbatch": True}),
    exhaustive("interleaved", 2, False, 0, {}),
]


def pipelined(zero_stage):
    return strategy_for(2 if zero_stage == 0 else 4, zero_stage, pipeline_parallel_size=2)


@pytest.mark.parametrize(("schedule", "stages_per_rank", "statistics", "zero_stage", "settings"), PIPELINES)
def test_pipelines(float64, schedule, stages_per_rank, statistics, zero_stage, settings):
    """Dropout draws the same masks, statistics move on once for a microbatch."""
    settings = {"schedule": schedule, "stages_per_rank": stages_per_rank, "statistics": statistics, "dropout": 0.3, **settings}
    kept, again = (run(lambda s, r=r: fitted(s, r, **settings), pipelined(zero_stage)) for r in (False, True))
    assert_same_tree(again, kept)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_pipeline_is_one_device(float64, zero_stage):
    found = run(lambda s: fitted(s, True, schedule="1f1b"), pipelined(zero_stage))
    assert_same_tree(found, run(lambda s: fitted(s, False), one_device()))


@pytest.mark.parametrize(("schedule", "zero_stage"), [("1f1b", 0), exhaustive("zero_bubble", 0), exhaustive("1f1b", 3)])
def test_what_a_pipeline_keeps(schedule, zero_stage):
    """Of a block nothing but what it takes and returns, and of one block at a time all is there."""

    def graph_of(is_recomputed, statistics=True):
        strategy = pipelined(zero_stage)
        model = pipeline(strategy, is_recomputed, schedule=schedule, statistics=statistics)
        model.optimizer.build(model.trainable_variables)
        train = lambda x, y: model.train_step((x, y))  # noqa: E731
        step = tf.function(lambda x, y: strategy.run(train, args=(x, y)))
        return step.get_concrete_function(tf.constant(X[:8, 0]), tf.constant(Y[:8])).graph

    assert len(kept_within_blocks(graph_of(is_recomputed=False))) > 40
    graph = graph_of(is_recomputed=True, statistics=False)
    assert kept_within_blocks(graph) == []
    again = [op for op in graph.get_operations() if op.type in ("Erf", "Erfc") and is_backward(op) and is_on(op, 0)]
    assert len(again) == 4  # two blocks, two microbatches
    for behind, operation in zip(again, again[1:], strict=False):
        assert {reader.name for reader in behind.outputs[0].consumers()} <= ancestors([operation])
