"""The layers that can be sharded in models of every sort: found, in order, with their shapes and uses."""

import keras
import pytest
from keras import layers, ops
from plan_models import chain, decoder, example_gpt, new_decoder, subclassed, with_raw_ops

from tfdist.extensions.tensor.plans import trace_model
from tfdist.extensions.tensor.plans.layer_uses import LayerUse


def by_name(model):
    return {known.layer.name: known for known in trace_model(model).layers}


def test_the_example():
    graph = trace_model(example_gpt(width=16, blocks=2, heads=4, seq_len=8))
    block = ["attention", "mlp_in", "mlp_out"]
    assert [known.path for known in graph.layers] == [
        "token_embedding",
        *(f"block_{i}_{name}" for i in range(2) for name in block),
        "logits",
    ]
    uses = {known.path: known.uses for known in graph.layers}
    assert uses["token_embedding"] == (LayerUse(0, 8 * 16, 8),)
    assert uses["block_1_attention"] == (LayerUse(8 * 16, 8 * 16, 8),)
    assert uses["block_1_mlp_in"] == (LayerUse(8 * 16, 8 * 64, 8),)
    assert all(known.is_traced and known.obstacle is None for known in graph.layers)
    assert graph.notes == ()


def test_uses_are_per_example():
    known = by_name(example_gpt(width=16, blocks=1, heads=4, seq_len=8))
    embedding, attention, mlp_in = (known[name].uses for name in ("token_embedding", "block_0_attention", "block_0_mlp_in"))
    assert embedding == (LayerUse(gradient_elements=0, output_elements=8 * 16, vectors=8),)
    assert attention == (LayerUse(8 * 16, 8 * 16, 8),)  # query, key and value are one tensor
    assert mlp_in == (LayerUse(8 * 16, 8 * 64, 8),)
    assert by_name(chain(5, 3))["dense_0"].uses == (LayerUse(0, 5, 1),)  # no gradient for the model's inputs


def test_cross_attention_has_two_inputs():
    query, value = keras.Input((6, 8)), keras.Input((5, 8))
    outputs = layers.MultiHeadAttention(2, 4, name="cross")(layers.Dense(8)(query), value)
    assert by_name(keras.Model([query, value], outputs))["cross"].uses == (LayerUse(6 * 8, 6 * 8, 6),)


def test_einsum_dense_transforms_vectors_of_all_contracted_axes():
    x = keras.Input((5, 2, 7))
    known = by_name(keras.Model(x, layers.EinsumDense("abde,def->abf", (None, 6), name="merge")(x)))
    assert known["merge"].uses == (LayerUse(0, 5 * 6, 5),)


def test_a_shared_layer_has_every_use():
    dense = layers.Dense(8, name="dense")
    x = keras.Input((8,))
    assert by_name(keras.Model(x, dense(dense(x))))["dense"].uses == (LayerUse(0, 8, 1), LayerUse(8, 8, 1))


def test_nested_subclassed_models():
    paths = [known.path for known in trace_model(decoder()).layers]
    assert paths[:6] == [
        "decoder/tokens/token",
        "decoder/tokens/position",
        "decoder/block_0/attention",
        "decoder/block_0/mlp/gate",
        "decoder/block_0/mlp/up",
        "decoder/block_0/mlp/down",
    ]
    assert paths[-1] == "decoder/head" and len(paths) == 11


def test_branches_and_several_inputs():
    a, b = keras.Input((4,), name="a"), keras.Input((6,), dtype="int32", name="b")
    x = layers.Concatenate()([layers.Dense(3, name="left")(a), layers.Flatten()(layers.Embedding(9, 2, name="right")(b))])
    model = keras.Model({"a": a, "b": b}, {"one": layers.Dense(2, name="one")(x), "two": layers.Dense(5, name="two")(x)})
    assert set(by_name(model)) == {"left", "right", "one", "two"}
    assert all(known.is_traced for known in trace_model(model).layers)


def test_inputs_of_a_subclassed_model_may_be_nested():
    def call(made, x):
        return made[0](x["ids"]) + made[1](x["pair"][1])

    example = {"ids": ops.ones((2, 3), "int32"), "pair": [ops.ones((2, 3, 5)), ops.ones((2, 3, 4))]}
    known = by_name(subclassed(call, layers.Embedding(9, 8, name="e"), layers.Dense(8, name="d"), example=example))
    assert [use.output_elements for name in ("e", "d") for use in known[name].uses] == [3 * 8, 3 * 8]
    assert known["e"].is_traced and known["d"].is_traced


def test_integer_inputs_are_tried_where_floats_do_not_fit():
    def call(made, x):
        return made[0](ops.bitwise_and(x, x))

    graph = trace_model(subclassed(call, layers.Embedding(9, 4, name="e"), example=ops.ones((2, 3), "int32")))
    assert graph.layers[0].is_traced and graph.notes == ()


def test_a_fixed_batch_size_is_kept():
    x = keras.Input(batch_shape=(6, 5, 4))
    model = keras.Model(x, layers.Dense(3, name="d")(ops.reshape(x, (30, 4))))
    assert by_name(model)["d"].uses == (LayerUse(0, 15, 5),)


def test_open_sizes_are_assumed_and_said():
    tokens = keras.Input((None,), dtype="int32")
    graph = trace_model(keras.Model(tokens, layers.Dense(3, name="d")(layers.Embedding(9, 4)(tokens))))
    assert graph.notes == ("Sizes that the model leaves open, such as a sequence's length, count as 128.",)
    assert graph.layers[1].uses == (LayerUse(128 * 4, 128 * 3, 128),)


def test_open_sizes_are_tried_until_the_model_can_be_followed():
    """The position embedding of this model has 64 rows: fewer than the first size tried."""

    class Positions(layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(name="table", shape=(64, 4))
            self.dense = layers.Dense(4, name="inner")
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x + self.table[: x.shape[1]] if x.shape[1] is not None else x)

    tokens = keras.Input((None,), dtype="int32")
    graph = trace_model(keras.Model(tokens, Positions()(layers.Embedding(9, 4)(tokens))))
    assert "count as 16." in graph.notes[0]
    assert all(known.is_traced for known in graph.layers)


@pytest.fixture
def mixed_precision():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy(before)


def test_mixed_precision(mixed_precision):
    """Casts come between the layers there; and the tokens carry a mask."""
    known = trace_model(new_decoder()).layers
    assert len(known) == 11 and all(layer.is_traced for layer in known)


def test_what_cannot_be_followed_is_said():
    graph = trace_model(with_raw_ops())
    assert {known.path: known.is_traced for known in graph.layers} == {
        "up": True,
        "down": True,
        "raw/first": False,
        "raw/second": False,
    }
    (note,) = graph.notes
    assert note.startswith("raw cannot be followed (ValueError: A KerasTensor cannot be used")
    assert note.endswith("the layers in it are not paired.")
    first = next(known for known in graph.layers if known.path == "raw/first")
    assert first.uses == (LayerUse(8, 16, 1),)


def test_a_model_that_cannot_be_called_on_symbols():
    def call(made, x):
        return made[0](x) if float(ops.sum(x)) > 0 else x

    graph = trace_model(subclassed(call, layers.Dense(4, name="d"), example=ops.ones((2, 4))))
    assert not graph.layers[0].is_traced
    assert graph.notes == ("subclassed does not know the shapes of its inputs: no layer is paired.",)


@pytest.mark.parametrize(
    "wrap, shape",
    [
        (layers.TimeDistributed, (3, 8)),
        (lambda dense: layers.SpectralNormalization(dense), (8,)),
    ],
)
def test_layers_in_a_loop_cannot_be_cut(wrap, shape):
    model = keras.Sequential([keras.Input(shape), wrap(layers.Dense(4, name="inner"))])
    (known,) = trace_model(model).layers
    assert known.obstacle == "the layer around it runs it in a loop or replaces its weights"


def test_weights_with_two_owners_cannot_be_cut():
    def call(made, x):
        embedding, dense = made
        return ops.matmul(dense(embedding(x)), ops.transpose(embedding.embeddings))

    model = subclassed(call, layers.Embedding(9, 4, name="e"), layers.Dense(4, name="d"), example=ops.ones((2, 3), "int32"))
    known = by_name(model)
    assert known["e"].obstacle == "its weights are used outside of its calls too"
    assert known["d"].obstacle is None


def test_attention_that_returns_its_scores_cannot_be_cut():
    x = keras.Input((5, 8))
    y, _ = layers.MultiHeadAttention(2, 4, name="attention")(x, x, return_attention_scores=True)
    assert by_name(keras.Model(x, y))["attention"].obstacle == "it returns its attention scores"


def test_bad_models():
    with pytest.raises(ValueError, match="`model` must be a `keras.Model`"):
        trace_model(layers.Dense(3))
    with pytest.raises(ValueError, match="`model` must be built.*Call it on a batch first"):
        trace_model(keras.Sequential([layers.Dense(3)]))
