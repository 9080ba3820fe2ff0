"""Recomputation beside all else that a model has: frozen and shared blocks, branches, clipping, half precision."""

import keras
import numpy as np
import pytest
from training import strategy_for

import tfdist
from tests.parity.comparison import assert_same_tree, state
from tests.programs.comparing import assert_as_on_one_device, run
from tests.programs.memory.test_recomputation import (
    CLASSES,
    LENGTH,
    WIDTH,
    Block,
    X,
    Y,
    compiled,
    head,
    recomputes,
    stack,
    trained,
)

pytestmark = [pytest.mark.as_traced]


def recomputed(strategy, model, layers="block"):
    return tfdist.recompute(model, layers) if recomputes(strategy) else model


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
    """A block, in a pipeline, too: with `statistics` every microbatch of its stage has operations of its own."""

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


def small_blocks(strategy, is_recomputed, dropout=0.0, statistics=False, depth=4, wrapped=lambda model: model):
    """A compiled model of `depth` small blocks, which `wrapped` may put in a pipeline."""
    with strategy.scope():
        blocks = [Small(dropout, statistics, name=f"block_{k}") for k in range(depth)]
        model = wrapped(keras.Sequential([keras.Input((WIDTH,)), *blocks, keras.layers.Dense(CLASSES)]))
        if is_recomputed:
            tfdist.recompute(model, "block")
        return compiled(model)


def fit(model):
    return model.fit(X[:, 0], Y, batch_size=8, shuffle=False, verbose=0).history, state(model)


def dense_blocks(strategy):
    """What two workers run beside one device: `tests.programs.test_over_workers`."""
    return fit(small_blocks(strategy, recomputes(strategy)))
