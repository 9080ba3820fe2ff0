"""Layers that are computed again in backward: one device's numbers, and nothing of what they compute is kept until then."""

import contextlib
import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import strategy_for

import tfdist
from tests.devices import is_on
from tests.parity.comparison import assert_same_tree, state
from tests.programs.comparing import assert_as_on_one_device, run
from tfdist.sharding import config_of

ROWS, LENGTH, WIDTH, CLASSES = 22, 5, 6, 3  # the last of batches of 8 rows has 6
X = np.random.default_rng(5).normal(size=(ROWS, LENGTH, WIDTH)).astype("float32")
TOKENS = np.random.default_rng(6).integers(0, 4, (ROWS, LENGTH))
Y = np.arange(ROWS) % CLASSES


class Block(keras.layers.Layer):
    """A decoder's block. It does what a block may do: draws, masks, statistics, a loss of its own, two kinds of arguments."""

    def __init__(self, dropout=0.0, statistics=False, attends=True, **kwargs):
        super().__init__(**kwargs)
        self.norm_1, self.norm_2 = keras.layers.LayerNormalization(), keras.layers.RMSNormalization()
        self.attention = keras.layers.MultiHeadAttention(2, 3, dropout=dropout) if attends else None
        self.mlp = keras.Sequential([keras.layers.Dense(11, activation="gelu"), keras.layers.Dense(WIDTH)])
        self.dropout = keras.layers.Dropout(dropout)
        self.statistics = keras.layers.BatchNormalization(synchronized=True) if statistics else None
        self.supports_masking = True

    def call(self, x, training=None, mask=None):
        normed = self.norm_1(x)
        if self.attention is not None:
            x = x + self.attention(normed, normed, use_causal_mask=True, training=training)
        x = x + self.dropout(self.mlp(self.norm_2(x)), training=training)
        self.add_loss(0.01 * keras.ops.mean(x**2))
        return x if self.statistics is None else self.statistics(x, training=training)


def recomputes(strategy):
    """One device keeps everything: Keras's scope fails in traced steps there."""
    return config_of(strategy) is not None


def compiled(model, optimizer=None, **settings):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer() if optimizer else keras.optimizers.SGD(0.1, momentum=0.9), loss=loss, **settings)
    return model


def head():
    return [keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(CLASSES)]


def stack(*blocks):
    return keras.Sequential([keras.Input((LENGTH, WIDTH)), keras.layers.Dense(WIDTH, name="first"), *blocks, *head()])


def trained(model, x=X, infers=True):
    history = model.fit(x, Y, batch_size=8, epochs=1, shuffle=False, verbose=0).history
    found = history, state(model)
    return (*found, model.evaluate(x, Y, batch_size=8, verbose=0), model.predict(x, batch_size=8, verbose=0)) if infers else found


def blocks_by_name(strategy, attends=True, **settings):
    with strategy.scope():
        model = stack(
            Block(statistics=True, attends=attends, name="block_0"), keras.layers.Dense(WIDTH, activation="gelu", name="block_1")
        )
        if recomputes(strategy):
            assert tfdist.recompute(model, "block") is model
        return trained(compiled(model, **settings))


def without_attention(strategy):
    return blocks_by_name(strategy, attends=False)


def several_steps_at_once(strategy):
    return blocks_by_name(strategy, steps_per_execution=2)


def accumulating(strategy):
    return blocks_by_name(strategy, optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))


def made_in_a_scope(strategy, **settings):
    with strategy.scope():
        with keras.RematScope(**settings) if recomputes(strategy) else contextlib.nullcontext():
            blocks = [Block(name="block_0"), keras.layers.Dense(WIDTH, activation="gelu", name="dense_0")]
        return trained(compiled(stack(*blocks)))


def in_a_full_scope(strategy):
    return made_in_a_scope(strategy, mode="full")


def in_a_scope_of_names(strategy):
    return made_in_a_scope(strategy, mode="list_of_layers", layer_names=["block_0"])


def in_a_scope_of_activations(strategy):
    return made_in_a_scope(strategy, mode="activations")


def in_a_scope_of_large_outputs(strategy):
    return made_in_a_scope(strategy, mode="larger_than", output_size_threshold=10)


def everything_in_a_full_scope(strategy):
    """The model too: recomputation within recomputation."""
    with strategy.scope(), keras.RematScope(mode="full") if recomputes(strategy) else contextlib.nullcontext():
        return trained(compiled(stack(Block(name="block_0"), Block(name="block_1"))))


class Remats(keras.layers.Layer):
    """As Keras's documentation shows `keras.remat`: of a function, and of a layer."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(11, activation="tanh"), keras.layers.Dense(WIDTH)
        self.norm = keras.layers.LayerNormalization()

    def call(self, x):
        wrap = keras.remat if recomputes(tf.distribute.get_strategy()) else lambda function: function

        def function(x):
            return self.out(self.hidden(x)) * tf.math.sigmoid(x), {"more": keras.ops.sin(x)}

        y, also = wrap(function)(x)
        return wrap(self.norm)(y) + also["more"] * self.hidden.bias[0]


def functions_of_ones_own(strategy):
    with strategy.scope():
        return trained(compiled(stack(Remats(), Remats())))


def in_eager_steps(strategy):
    with strategy.scope():
        return trained(compiled(stack(Remats()), run_eagerly=True))


def one_block_used_twice(strategy):
    with strategy.scope():
        block = Block(name="block")
        inputs = keras.Input((LENGTH, WIDTH))
        model = keras.Model(inputs, head()[1](head()[0](block(keras.layers.Dense(WIDTH)(block(inputs))))))
        if recomputes(strategy):
            tfdist.recompute(model, [block])
        return trained(compiled(model))


def masks_pass(strategy):
    with strategy.scope():
        layers = [keras.layers.Embedding(4, WIDTH, mask_zero=True), Block(name="block_0"), keras.layers.LSTM(4)]
        model = keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *layers, keras.layers.Dense(CLASSES)])
        if recomputes(strategy):
            tfdist.recompute(model, "block|lstm")
        return trained(compiled(model), TOKENS)


def a_loop_of_ones_own_with_a_penalty_on_gradients(strategy):
    """Second order: the gradient of a gradient passes a recomputed layer."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(9, "tanh", name=f"block_{k}") for k in range(3))])
        if recomputes(strategy):
            tfdist.recompute(model, "block")
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def rank_step(x):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(model(x, training=True) ** 2)
            loss = (y + tf.reduce_sum(inner.gradient(y, x) ** 2)) / 8
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    step = tf.function(lambda x: strategy.reduce("SUM", strategy.run(rank_step, args=(x,)), axis=None))
    dataset = tf.data.Dataset.from_tensor_slices(X[:16, 0]).batch(8).repeat(2)
    return [float(step(x)) for x in strategy.experimental_distribute_dataset(dataset)], model.get_weights()


@pytest.mark.as_traced
@pytest.mark.parametrize("zero_stage", [*map(exhaustive, (0, 1, 2)), 3])
@pytest.mark.parametrize(
    "program",
    [
        without_attention,
        exhaustive(blocks_by_name),
        exhaustive(in_eager_steps),
        exhaustive(several_steps_at_once),
        exhaustive(accumulating),
        exhaustive(in_a_full_scope),
        exhaustive(in_a_scope_of_names),
        exhaustive(in_a_scope_of_activations),
        exhaustive(in_a_scope_of_large_outputs),
        exhaustive(everything_in_a_full_scope),
        exhaustive(functions_of_ones_own),
        exhaustive(one_block_used_twice),
        exhaustive(masks_pass),
        a_loop_of_ones_own_with_a_penalty_on_gradients,
    ],
)
def test_as_on_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage, rtol=3e-5)


class Thinned(keras.layers.Layer):
    """Dropout, times a weight: the weight's gradient tells what was drawn when it was computed."""

    def build(self, shape):
        self.scale, self.dropout = self.add_weight(shape=(), initializer="ones", name="scale"), keras.layers.Dropout(0.4)

    def call(self, x, training=None):
        return self.scale * self.dropout(x, training=training)


@pytest.mark.as_traced
@pytest.mark.parametrize("zero_stage", [exhaustive(0), 3])
def test_what_is_drawn_again_is_what_was_drawn(zero_stage):
    strategy = strategy_for(2, zero_stage)
    with strategy.scope():
        model = keras.Sequential([keras.Input((50,)), Thinned(name="block")])
        tfdist.recompute(model, "block")

    def on_rank():
        with tf.GradientTape() as tape:
            drawn = tf.reduce_sum(model(tf.random.stateless_uniform((4, 50), (1, 2)), training=True))
        return drawn, tape.gradient(drawn, model.trainable_variables[0])

    drawn, again = (strategy.experimental_local_results(x) for x in tf.function(lambda: strategy.run(on_rank))())
    np.testing.assert_allclose(sum(map(float, again)), sum(map(float, drawn)), rtol=1e-5)
    assert abs(float(drawn[0]) - float(drawn[1])) > 1e-3, "nothing was drawn"


@pytest.mark.parametrize(("zero_stage", "infers"), [exhaustive(3, False), exhaustive(0, True), exhaustive(3, True)])
def test_what_is_drawn_is_drawn_once(zero_stage, infers):
    def drops(strategy, is_recomputed):
        with strategy.scope():
            model = stack(Block(dropout=0.4, name="block"))
            if is_recomputed:
                tfdist.recompute(model, "block")
            return trained(compiled(model), infers=infers), [variable.numpy() for variable in model.non_trainable_variables]

    kept, again = (run(lambda s, r=r: drops(s, r), strategy_for(2, zero_stage)) for r in (False, True))
    assert_same_tree(again, kept)


DEPTH = 2  # blocks


@functools.cache
def traced(zero_stage, is_recomputed):
    """Returns the graph of a step, and its plan."""
    strategy = strategy_for(2, zero_stage, group_bytes=2**10)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((LENGTH, WIDTH)), keras.layers.Dense(WIDTH), *(Block(name=f"block_{k}") for k in range(DEPTH)), *head()]
        )
        if is_recomputed:
            tfdist.recompute(model, "block")
        compiled(model)
        model.optimizer.build(model.trainable_variables)

    def rank_step(x, y):
        return model.train_step((x, y))

    step = tf.function(lambda x, y: strategy.run(rank_step, args=(x, y)))
    return step.get_concrete_function(tf.constant(X[:8]), tf.constant(Y[:8])).graph, strategy.last_plan


def is_backward(operation):
    return "gradient_tape" in operation.name


def ancestors(operations):
    found, waiting = set(), list(operations)
    while waiting:
        operation = waiting.pop()
        if operation.name not in found:
            found.add(operation.name)
            waiting += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    return found


def kept_within_blocks(graph):
    """Returns the floating results of the blocks' operations that an operation of backward reads, but for what a block returns:
    its last sum, and that handed on."""
    ends = [op for op in graph.get_operations() if op.type in ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")]
    runs = ancestors(ends)
    inside = re.compile(r"/block_\d_\d/(?!add_1$|Identity$)(?!.*unshard)")
    return [
        op.name
        for op in graph.get_operations()
        if inside.search(op.name) and not is_backward(op) and op.type not in ("Const", "ReadVariableOp")
        for tensor in op.outputs
        if tensor.dtype.is_floating and tensor.shape.rank
        if any(is_backward(reader) and reader.name in runs for reader in tensor.consumers())
    ]


@pytest.mark.parametrize("zero_stage", [exhaustive(0), 3])
def test_nothing_is_kept_that_lies_between(zero_stage):
    assert len(kept_within_blocks(traced(zero_stage, is_recomputed=False)[0])) > 30
    assert kept_within_blocks(traced(zero_stage, is_recomputed=True)[0]) == []


@pytest.mark.parametrize("zero_stage", [exhaustive(0), 3])
def test_a_block_is_computed_again_when_backward_is_through_with_the_one_behind_it(zero_stage):
    """Attention's softmax of block k is made again after the backward of that of block k + 1."""
    graph, _ = traced(zero_stage, is_recomputed=True)
    on_rank_0 = [op for op in graph.get_operations() if is_on(op, 0)]
    again = [op for op in on_rank_0 if op.type == "Softmax" and is_backward(op)]
    assert len(again) == DEPTH
    readers = [[reader for reader in op.outputs[0].consumers() if "/gradient_tape/" in f"/{reader.name}"] for op in again]
    for behind, operation in zip(readers, again[1:], strict=False):
        assert behind and {reader.name for reader in behind} <= ancestors([operation])


@pytest.mark.parametrize("zero_stage", [exhaustive(0), exhaustive(2), 3])
def test_a_block_is_computed_again_when_the_logits_have_been_read(zero_stage):
    """The gradient of the last layer's bias reads them, and no other operation of backward waits for it."""
    graph, _ = traced(zero_stage, is_recomputed=True)
    on_rank_0 = [op for op in graph.get_operations() if is_on(op, 0) and is_backward(op)]
    first = next(op for op in on_rank_0 if op.type == "Softmax")
    read = [op for op in on_rank_0 if op.type in ("Sum", "BiasAddGrad") and op.inputs[0].shape[1:] == (CLASSES,)]
    assert read and {op.name for op in read} <= ancestors([first])
    assert not any(is_on(before, 1) for op in on_rank_0 for before in op.control_inputs)


def test_no_message_more():
    plans = [traced(3, is_recomputed=again)[1] for again in (False, True)]
    assert plans[0].counts() == plans[1].counts()
    assert plans[1].counts()["all_gather"] > 4


def test_what_is_refused():
    with strategy_for(2, 3).scope():
        model = stack(Block(name="block_0"))
    with pytest.raises(ValueError, match="`layers` must match, or list, layers of the model.*Its layers are .*block_0"):
        tfdist.recompute(model, "transformer")
    with pytest.raises(ValueError, match="`layers` must match, or list"):
        tfdist.recompute(model, [keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="`model` must be a Keras model that was made in the scope of a tfdist strategy"):
        tfdist.recompute(keras.Sequential([keras.layers.Dense(3)]), "dense")
