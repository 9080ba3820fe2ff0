"""LoRA on layers that are sharded over the tensor ranks: enabled before and after sharding and training, saved and loaded."""

import keras
import numpy as np
import pytest
from grids import exhaustive

import tfdist
from tests.devices import names
from tests.parity.comparison import assert_same_tree, state
from tests.programs.comparing import assert_as_on_one_device

pytestmark = pytest.mark.as_traced

layers = keras.layers
LENGTH, VOCABULARY = 4, 9
PLAN = {"table": "vocab", "attention": "column", "up": "column", "down": "row", "mix": "column", "back": "row", "head": "column"}
ADAPTED = {*PLAN, "query", "value", "attention_output"} - {"attention"}


def model():
    """One layer of each kind that has factors, sharded along its last axis and along another one."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 8, name="table")(tokens)
    x = x + layers.MultiHeadAttention(2, 4, name="attention")(x, x)
    x = layers.Dense(6, "tanh", name="up")(x)
    x = layers.Dense(8, name="down")(x)
    x = layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de", name="mix")(x)
    x = layers.EinsumDense("abde,dec->abc", (None, 8), bias_axes="c", activation="tanh", name="back")(x)
    return keras.Model(tokens, layers.Dense(VOCABULARY + 1, kernel_regularizer="l2", name="head")(x))


def enable_lora(made):
    """On every layer that has factors, within the attention too; the second factor, which begins as zeros, gets numbers."""
    rng = np.random.default_rng(4)
    for layer in made._flatten_layers():
        if layer.name not in ADAPTED:
            continue
        layer.enable_lora(2)
        second = getattr(layer, "lora_kernel_b", None)
        second = layer.lora_embeddings_b if second is None else second
        second.assign(rng.normal(scale=0.3, size=second.shape))


def data():
    rng = np.random.default_rng(6)
    return rng.integers(0, VOCABULARY, (24, LENGTH)), rng.integers(0, VOCABULARY, (24, LENGTH))


def shard(made, strategy):
    if getattr(strategy, "mesh", None) is not None:
        tfdist.parallelize(made, PLAN, print_fn=None)


def fit(made, strategy):
    x, y = data()
    with strategy.scope():
        made.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = made.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)
    return {"history": history.history, **state(made), "predictions": made.predict(x[:5], verbose=0)}


def before_sharding(strategy):
    with strategy.scope():
        made = model()
        enable_lora(made)
        shard(made, strategy)
    return fit(made, strategy)


def after_training(strategy):
    """As a user fine-tunes: sharded and trained, then adapted, outside the scope, and trained again."""
    with strategy.scope():
        made = model()
        shard(made, strategy)
    first = fit(made, strategy)
    enable_lora(made)
    return first, fit(made, strategy)


def saved(strategy, path):
    with strategy.scope():
        made = model()
        shard(made, strategy)
        enable_lora(made)
    trained = fit(made, strategy)
    made.save_weights(path)
    return trained


@pytest.mark.parametrize(
    ("program", "tensor", "data_ranks", "zero_stage"),
    [
        exhaustive(before_sharding, 2, 1, 0),
        exhaustive(after_training, 2, 1, 0),
        exhaustive(before_sharding, 2, 2, 3),
        exhaustive(after_training, 2, 2, 3),
        *(exhaustive(program, 2, 2, stage) for program in (before_sharding, after_training) for stage in (1, 2)),
    ],
)
def test_it_is_one_device(program, tensor, data_ranks, zero_stage):
    assert_as_on_one_device(program, zero_stage, tensor * data_ranks, tensor_parallel_size=tensor)


def test_frozen_weights_stay_sharded_over_both_axes():
    strategy = tfdist.ShardedStrategy(names(4), zero_stage=3, tensor_parallel_size=2)
    with strategy.scope():
        made = model()
        enable_lora(made)
        shard(made, strategy)
    up, down = made.get_layer("up"), made.get_layer("down")
    assert not up._kernel.trainable and not down._kernel.trainable
    for variable in (up._kernel, up.lora_kernel_b, down._kernel, down.lora_kernel_a):
        layout = variable._value.layout
        assert layout.is_tensor_sharded and layout.is_data_sharded, variable.path
    assert not up.lora_kernel_a._value.layout.is_tensor_sharded


def test_files_are_those_of_one_device(tmp_path):
    """Kernel and product are written as one, as Keras does, and any model reads them."""
    path = tmp_path / "it.weights.h5"
    strategy = tfdist.ShardedStrategy(names(2), tensor_parallel_size=2)
    keras.utils.set_random_seed(3)
    trained = saved(strategy, path)
    plain = model()
    plain.load_weights(path)
    assert_same_tree(plain.predict(data()[0][:5], verbose=0), trained["predictions"])
    with strategy.scope():
        again = model()
        shard(again, strategy)
        enable_lora(again)
    again.load_weights(path)
    assert_same_tree(again.predict(data()[0][:5], verbose=0), trained["predictions"])
