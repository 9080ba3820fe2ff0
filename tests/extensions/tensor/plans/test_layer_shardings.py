"""A plan on a model: the shards in order, and everything that is refused."""

import keras
import pytest
from keras import layers, ops
from plan_models import chain, decoder, example_gpt, subclassed, with_raw_ops

from tfdist.extensions.tensor.plans import LayerSharding, TensorPlan, resolve

GPT_PLAN = {"embedding$": "vocab", "attention$": "column", "mlp_in": "column", "mlp_out": "row", "logits": "column"}


def table(shardings):
    return [(sharding.path, sharding.role, sharding.gather_output, sharding.input_is_parallel) for sharding in shardings]


def test_the_example():
    model = example_gpt(blocks=1)
    plan = {"token_embedding": "vocab", **GPT_PLAN, "position_embedding": "replicate"}
    del plan["embedding$"]
    shardings = resolve(model, plan, 4)
    assert all(isinstance(sharding, LayerSharding) and sharding.layer is model.get_layer(sharding.path) for sharding in shardings)
    assert table(shardings) == [
        ("token_embedding", "vocab", False, False),
        ("block_0_attention", "column", False, False),
        ("block_0_mlp_in", "column", False, False),
        ("block_0_mlp_out", "row", False, True),
        ("logits", "column", True, False),
    ]
    assert table(resolve(model, TensorPlan(plan), 1)) == table(shardings)


def test_layers_without_a_role_and_replicated_ones_are_left_out():
    assert table(resolve(chain(4, 4, 4), {"dense_1": "replicate", "dense_2": "row"}, 2)) == [
        ("chain/dense_2", "row", False, False)
    ]


def test_a_pattern_that_matches_a_block_is_meant_for_the_layers_in_it():
    shardings = resolve(decoder(), {"norm": "replicate", "block_0/mlp/down": "row", "block_0": "column"}, 2)
    assert [(sharding.path.split("/")[-1], sharding.role) for sharding in shardings] == [
        ("attention", "column"),
        ("gate", "column"),
        ("up", "column"),
        ("down", "row"),
    ]


def test_layers_without_weights_may_be_matched_too():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="mlp_in"), layers.Dropout(0.1, name="mlp_dropout")])
    assert len(resolve(model, {"mlp": "column"}, 2)) == 1


@pytest.mark.parametrize("pattern", ["mlp_inn", "^dense$", "dropout"])
def test_patterns_that_match_nothing(pattern):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="mlp_in"), layers.Dropout(0.1, name="dropout")])
    with pytest.raises(
        ValueError,
        match=rf"match a layer with weights. Received: pattern='{pattern.replace('^', '.').replace('$', '.')}'.*mlp_in",
    ):
        resolve(model, {pattern: "column"}, 2)


@pytest.mark.parametrize(
    "patterns, message",
    [
        (
            {"final_norm": "column"},
            "can shard Dense, .*Received: pattern='final_norm', role='column', layer='final_norm', type='Layer",
        ),
        ({"position": "vocab"}, "type='PositionEmbedding'. Narrow the pattern"),
        ({"block_0": "column"}, "layer='block_0_attention_norm'"),
        (
            {"mlp_in": "vocab"},
            r"a Dense one of the roles \('column', 'row', 'replicate'\). Received: layer='block_0_mlp_in', role='vocab'",
        ),
        ({"token": "column"}, r"an? Embedding one of the roles \('vocab', 'replicate'\)"),
        ({"attention$": "row"}, r"MultiHeadAttention one of the roles \('column', 'replicate'\)"),
        ({"attention/query": "column"}, "attention layer as a whole"),
    ],
)
def test_layers_that_cannot_be_cut_so(patterns, message):
    with pytest.raises(ValueError, match=message):
        resolve(example_gpt(blocks=1), patterns, 2)


def test_a_block_without_layers_that_can_be_cut():
    model = keras.Sequential([keras.Input((5, 8)), layers.LSTM(4, name="memory"), layers.Dense(2, name="head")])
    with pytest.raises(ValueError, match="layer='sequential.*memory.*', type='LSTMCell'"):
        resolve(model, {"memory": "column"}, 2)
    with pytest.raises(ValueError, match="type='LSTM'"):
        resolve(model, {"memory$": "column"}, 2)
    assert resolve(model, {"memory": "replicate"}, 2) == []


@pytest.mark.parametrize(
    "patterns, ranks, message",
    [
        (
            {"mlp_in": "column"},
            3,
            "the units of a layer.*tensor_parallel_size=3, layer='block_0_mlp_in', units=64. Nearest sizes: 63 and 66.",
        ),
        ({"mlp_in": "row"}, 5, "the input features .*input features=16. Nearest sizes: 15 and 20"),
        ({"attention$": "column"}, 8, "the num_heads .*num_heads=4. Nearest sizes: 8. Or give"),
    ],
)
def test_sizes_that_are_not_divisible(patterns, ranks, message):
    with pytest.raises(ValueError, match=message):
        resolve(example_gpt(blocks=1), patterns, ranks)


def test_both_head_counts_must_be_divisible():
    def model(query_heads, key_value_heads):
        x = keras.Input((5, 8))
        return keras.Model(x, layers.GroupQueryAttention(4, query_heads, key_value_heads, name="attention")(x, x))

    for key_value_heads in (1, 2, 4, 8):  # ranks may share a head of keys and values
        assert len(resolve(model(8, key_value_heads), {"attention": "column"}, 4)) == 1
    with pytest.raises(ValueError, match="num_key_value_heads=3. Nearest sizes: 4"):
        resolve(model(12, 3), {"attention": "column"}, 4)
    with pytest.raises(ValueError, match="num_query_heads=6. Nearest sizes: 4 and 8"):
        resolve(model(6, 2), {"attention": "column"}, 4)


def test_any_vocabulary_is_cut():
    table = layers.Embedding(7, 3, name="table")
    (sharding,) = resolve(keras.Sequential([keras.Input((5,), dtype="int32"), table]), {"table": "vocab"}, 4)
    assert (sharding.layer, sharding.role, sharding.gather_output, sharding.input_is_parallel) == (table, "vocab", False, False)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", None])
def test_bad_sizes(size):
    with pytest.raises(ValueError, match="`tensor_parallel_size` must be a positive integer. Received: tensor_parallel_size="):
        resolve(chain(4), {"dense": "column"}, size)


def test_our_own_limits():
    model = chain(4, 4)
    model.layers[0].quantize("int8")
    with pytest.raises(NotImplementedError, match='it is quantized. Received: layer=.*dense_0.*the role "replicate"'):
        resolve(model, {"dense": "column"}, 2)
    assert len(resolve(model, {"dense_0": "replicate", "dense": "column"}, 2)) == 1

    def tied(made, x):
        return ops.matmul(made[0](x), ops.transpose(made[0].embeddings))

    model = subclassed(tied, layers.Embedding(8, 4, name="e"), example=ops.ones((2, 3), "int32"))
    with pytest.raises(NotImplementedError, match="its weights are used outside of its calls too"):
        resolve(model, {"e$": "vocab"}, 2)


def test_what_cannot_be_followed_is_gathered_and_cut():
    shardings = resolve(with_raw_ops(), {"first": "column", "second": "row"}, 2)
    assert table(shardings) == [("raw/first", "column", True, False), ("raw/second", "row", False, False)]


def test_a_softmax_is_gathered():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, "softmax", name="a"), layers.Dense(4, name="b")])
    assert [sharding.gather_output for sharding in resolve(model, {"a$": "column", "b$": "row"}, 2)] == [True, False]


def test_unbuilt_models_are_refused():
    with pytest.raises(ValueError, match="`model` must be built"):
        resolve(keras.Sequential([layers.Dense(3)]), {"dense": "column"}, 2)
