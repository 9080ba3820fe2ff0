"""Tensor-parallel layers beside Keras's: they are the same layer outside replicas, and say what they cannot do."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from ranks import local, strategy_on, trace

import tfdist
from tfdist.extensions.tensor import regions
from tfdist.keras_layers.randomness import sharded_region

layers = tfdist.layers
tokens = np.arange(24).reshape(3, 8) % 13
vectors = np.random.default_rng(0).normal(size=(3, 8, 12)).astype("float32")
mask = tokens % 5 > 0

# parallel layer, Keras's, call
PAIRS = {
    "column": (lambda: layers.ColumnParallelDense(20, "gelu"), lambda: keras.layers.Dense(20, "gelu"), lambda f: f(vectors)),
    "row": (lambda: layers.RowParallelDense(20, "softmax"), lambda: keras.layers.Dense(20, "softmax"), lambda f: f(vectors)),
    "column einsum": (
        lambda: layers.ColumnParallelEinsumDense("abc,cde->abde", (None, 4, 3), bias_axes="de"),
        lambda: keras.layers.EinsumDense("abc,cde->abde", (None, 4, 3), bias_axes="de"),
        lambda f: f(vectors),
    ),
    "row einsum": (
        lambda: layers.RowParallelEinsumDense("...c,cd->...d", 7, bias_axes="d", activation="relu"),
        lambda: keras.layers.EinsumDense("...c,cd->...d", 7, bias_axes="d", activation="relu"),
        lambda f: f(vectors),
    ),
    "embedding": (
        lambda: layers.VocabParallelEmbedding(13, 4, mask_zero=True),
        lambda: keras.layers.Embedding(13, 4, mask_zero=True),
        lambda f: f(tokens),
    ),
    "reversible embedding": (
        lambda: layers.VocabParallelReversibleEmbedding(13, 12, logit_soft_cap=2.0),
        lambda: keras.layers.ReversibleEmbedding(13, 12, logit_soft_cap=2.0),
        lambda f: f(vectors, reverse=True),
    ),
    "attention": (
        lambda: layers.ParallelMultiHeadAttention(4, 3, use_gate=True),
        lambda: keras.layers.MultiHeadAttention(4, 3, use_gate=True),
        lambda f: f(vectors, vectors, attention_mask=mask[:, None, :], use_causal_mask=True),
    ),
    "grouped attention": (
        lambda: layers.ParallelGroupedQueryAttention(3, 8, 4),
        lambda: keras.layers.GroupQueryAttention(3, 8, 4),
        lambda f: f(vectors, vectors, use_causal_mask=True),
    ),
}

PAIRS["one head of keys"] = (
    lambda: layers.ParallelGroupedQueryAttention(3, 8, 1, use_gate=True),
    lambda: keras.layers.GroupQueryAttention(3, 8, 1, use_gate=True),
    lambda f: f(vectors, vectors, use_causal_mask=True),
)


def built(make, call):
    keras.utils.set_random_seed(2)
    layer = make()
    return layer, np.asarray(call(layer))


@pytest.mark.parametrize("name", PAIRS)
def test_outside_replicas_it_is_the_keras_layer(name):
    parallel, plain, call = PAIRS[name]
    expected_layer, expected = built(plain, call)
    for strategy in (tf.distribute.get_strategy(), strategy_on(2), strategy_on(4, tensor_parallel_size=4)):
        with strategy.scope():
            layer, output = built(parallel, call)
            np.testing.assert_allclose(output, expected, rtol=1e-6, atol=1e-6)
            copy = type(layer).from_config(layer.get_config())
        assert isinstance(layer, type(expected_layer))
        for mine, theirs in zip(layer.get_weights(), expected_layer.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, theirs)  # the same initial weights, at every tensor size, and whole
        assert copy.get_config() == layer.get_config()


# Parity of whole models covers, on 4 ranks, the layers whose case is exhaustive there.
ON_FOUR_RANKS = ["column", "column einsum", "reversible embedding", "grouped attention", "one head of keys"]


@pytest.mark.parametrize(
    ("name", "devices"),
    [(name, 2) for name in PAIRS] + [(name, 4) if name in ON_FOUR_RANKS else exhaustive(name, 4) for name in PAIRS],
)
def test_inside_replicas_it_computes_the_same(name, devices):
    parallel, plain, call = PAIRS[name]
    _, expected = built(plain, call)
    strategy = strategy_on(devices, tensor_parallel_size=devices, zero_stage=3)
    with strategy.scope():
        layer, _ = built(parallel, call)
    for output in local(strategy, trace(strategy, lambda: call(layer))()):
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    assert any(len(record.ranks) == devices for record in strategy.last_plan.records[0]), "nothing was sharded"


def test_where_an_output_that_stays_sharded_is_sharded():
    """As a pipeline asks, which is divided behind the layer."""

    def shard(layer, shape=(None, 8, 12)):
        layer.build(shape)
        return layer.output_shard and (layer.output_shard.axis, layer.output_shard.size)

    einsum = functools.partial(layers.ColumnParallelEinsumDense, gather_output=False)
    assert shard(einsum("abc,cde->abde", (None, 4, 3))) == (2, 4)
    assert shard(einsum("...c,cd->...d", 6)) == (-1, 6)
    assert shard(layers.ColumnParallelEinsumDense("abc,cd->abd", (None, 6))) is None
    assert shard(layers.ColumnParallelDense(6, gather_output=False)) == (-1, 6)
    image = (None, 5, 5, 3)
    assert shard(layers.ColumnParallelConv2D(6, 3, gather_output=False), image) == (-1, 6)
    assert shard(layers.ColumnParallelConv2D(6, 3, gather_output=False, data_format="channels_first"), image) == (1, 6)
    assert shard(layers.ColumnParallelConv2D(6, 3), image) is None
    assert shard(layers.ChannelParallelBatchNormalization(), image) == (-1, 3)


def test_attention_of_masked_inputs_and_its_scores():
    def call(layer):
        query = keras.layers.Masking()(np.where(mask[..., None], vectors, 0.0).astype("float32"))
        heads = np.random.default_rng(1).random((3, 4, 8, 8)) > 0.2
        masked = layer(query, query, return_attention_scores=True)
        return *masked, layer(vectors, vectors, attention_mask=tf.constant(heads))

    keras.utils.set_random_seed(2)
    plain = keras.layers.MultiHeadAttention(4, 3)
    expected = [np.asarray(x) for x in call(plain)]
    strategy = strategy_on(2, tensor_parallel_size=2)
    with strategy.scope():
        layer = layers.ParallelMultiHeadAttention(4, 3)
        layer.build(vectors.shape, vectors.shape)
        layer.set_weights(plain.get_weights())
    for found in local(strategy, trace(strategy, lambda: call(layer))()):
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_weights_and_models_travel_to_plain_keras(tmp_path):
    def model(dense):
        return keras.Sequential([keras.Input((12,)), dense(20, activation="relu", name="a"), dense(5, name="b")])

    strategy = strategy_on(4, tensor_parallel_size=2, zero_stage=3)
    with strategy.scope():
        parallel = keras.Sequential(
            [
                keras.Input((12,)),
                layers.ColumnParallelDense(20, activation="relu", gather_output=False, name="a"),
                layers.RowParallelDense(5, input_is_parallel=True, name="b"),
            ]
        )
    parallel.save_weights(tmp_path / "it.weights.h5")
    plain = model(keras.layers.Dense)
    plain.load_weights(tmp_path / "it.weights.h5")
    x = vectors[0]
    np.testing.assert_allclose(parallel.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    parallel.save(tmp_path / "it.keras")
    alone = keras.models.load_model(tmp_path / "it.keras")
    np.testing.assert_allclose(alone(x), plain(x), rtol=1e-5, atol=1e-6)
    plain.set_weights([weight + 1 for weight in plain.get_weights()])
    plain.save_weights(tmp_path / "other.weights.h5")
    parallel.load_weights(tmp_path / "other.weights.h5")
    np.testing.assert_allclose(parallel.predict(x, verbose=0), plain(x), rtol=1e-5, atol=1e-6)


# What a loss computes


@pytest.mark.parametrize("options", [{}, {"ignore_class": 2}, {"label_smoothing": 0.2}])
@pytest.mark.parametrize("from_logits", [True, False])
def test_loss_beside_kerass(options, from_logits):
    rng = np.random.default_rng(3)
    predictions = rng.normal(size=(4, 5, 6)) if from_logits else rng.dirichlet(np.ones(6), (4, 5))
    labels = rng.integers(0, 6, (4, 5))
    if "label_smoothing" in options:
        expected = keras.losses.CategoricalCrossentropy(from_logits=from_logits, **options)(np.eye(6)[labels], predictions)
    else:
        expected = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits, **options)(labels, predictions)
    loss = layers.VocabParallelCrossentropy(from_logits=from_logits, **options)
    np.testing.assert_allclose(loss(labels, predictions), expected, rtol=1e-5)
    again = layers.VocabParallelCrossentropy.from_config(loss.get_config())
    np.testing.assert_allclose(again(labels[..., None], predictions), expected, rtol=1e-5)
    strategy = strategy_on(2, tensor_parallel_size=2)
    found = trace(strategy, lambda: loss(labels, tf.constant(predictions)))()
    for value in local(strategy, found):  # whole predictions are taken as they are
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert strategy.last_plan.counts() == {}


def test_loss_of_large_logits_and_unknown_labels():
    loss = layers.VocabParallelCrossentropy(from_logits=True, reduction=None)
    np.testing.assert_allclose(loss(np.array([0, 1]), np.array([[1e4, 0.0], [1e4, 0.0]])), [0.0, 1e4])
    assert np.isnan(loss(np.array([7]), np.array([[1.0, 0.0]]))).all()


# Randomness


def test_tensor_ranks_drop_alike_but_in_a_cut_region():
    strategy = strategy_on(4, tensor_parallel_size=2)
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=1)

    def on_rank():
        outside = dropout(tf.ones([64]), training=True)
        with sharded_region():
            inside = dropout(tf.ones([64]), training=True)
        return outside, inside

    step = trace(strategy, on_rank)
    (a, b, c, d), again = local(strategy, step()), None
    np.testing.assert_array_equal(a[0], b[0])  # tensor peers
    np.testing.assert_array_equal(c[0], d[0])
    assert (a[0] != c[0]).any()  # other examples
    masks = [rank[1] for rank in (a, b, c, d)]
    assert all((one != other).any() for i, one in enumerate(masks) for other in masks[:i])
    with strategy.scope():
        dropout.seed_generator.state.assign(keras.random.SeedGenerator(1).state)
    again = local(strategy, step())
    for rank, before in zip(again, (a, b, c, d), strict=True):
        np.testing.assert_array_equal(rank[1], before[1])


# What is refused


def under(tensor, make, shape=(3, 12)):
    strategy = strategy_on(tensor, tensor_parallel_size=tensor)
    with strategy.scope():
        layer = make()
        layer.build(*shape) if isinstance(shape[0], tuple) else layer.build(shape)
    return strategy, layer


ATTENTION = ((3, 8, 12), (3, 8, 12))


@pytest.mark.parametrize(
    ("make", "shape", "words"),
    [
        (lambda: layers.ColumnParallelDense(9), (3, 12), ["units=9", "tensor_parallel_size=2", "8, 10"]),
        (lambda: layers.RowParallelDense(4), (3, 11), ["input size", "10, 12"]),
        (lambda: layers.ParallelMLP(7), (3, 12), ["units=7", "6, 8"]),
        (lambda: layers.ParallelMultiHeadAttention(3, 4), ATTENTION, ["num_heads=3", "2, 4"]),
        (lambda: layers.ParallelGroupedQueryAttention(4, 6, 3), ATTENTION, ["num_key_value_heads=3", "2, 4"]),
        (lambda: layers.ColumnParallelEinsumDense("ab,bc->ac", 5), (3, 12), ["axis c", "4, 6"]),
        (lambda: layers.RowParallelEinsumDense("ab,a->ab", 5), (3, 12), ["no label to shard by row", "ab,a->ab"]),
        (lambda: layers.ParallelTransformerBlock(5, 8), (3, 8, 12), ["num_heads", "12 input features"]),
    ],
)
def test_sizes_that_cannot_be_cut(make, shape, words):
    with pytest.raises(ValueError) as error:
        under(2, make, shape)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: layers.ColumnParallelDense(4, "softmax", gather_output=False), ValueError, ["activation='softmax'"]),
        (
            lambda: layers.ColumnParallelDense(4, gather_output=False, activity_regularizer="l2"),
            NotImplementedError,
            ["activity_regularizer"],
        ),
        (lambda: layers.ParallelTransformerBlock(4, 8, gather_output=False), ValueError, ["sequence_parallel=True"]),
        (lambda: layers.ParallelTransformerBlock(4, 8, normalization="batch"), ValueError, ["normalization='batch'"]),
        (lambda: layers.VocabParallelCrossentropy(label_smoothing=1.0), ValueError, ["label_smoothing=1.0"]),
        (lambda: layers.ParallelMLP(4, units=0), ValueError, ["units=0"]),
        (lambda: under(2, lambda: layers.ColumnParallelDense(4))[1].quantize("int8"), NotImplementedError, ["Quantization"]),
        (
            lambda: under(2, lambda: layers.ParallelMultiHeadAttention(4, 4, activity_regularizer="l2"), ATTENTION),
            NotImplementedError,
            ["activity_regularizer"],
        ),
    ],
)
def test_arguments_that_are_refused(make, error, words):
    with pytest.raises(error) as found:
        make()
    assert all(word in str(found.value) for word in words), found.value


def test_one_hot_labels_are_refused():
    with pytest.raises(ValueError, match="argmax"):
        layers.VocabParallelCrossentropy()(np.eye(3), np.eye(3))


@pytest.mark.parametrize(("is_parallel", "features", "fix"), [(True, 12, "input_is_parallel=False"), (False, 6, "6 of 12")])
def test_an_input_that_is_not_what_was_said(is_parallel, features, fix):
    strategy, layer = under(2, lambda: layers.RowParallelDense(4, input_is_parallel=is_parallel))
    with pytest.raises(ValueError, match=fix):
        trace(strategy, lambda: layer(tf.ones([3, features])))()


def test_a_layer_that_was_built_outside_the_scope():
    layer = layers.ColumnParallelDense(4)
    layer.build((3, 12))
    strategy = strategy_on(2, tensor_parallel_size=2)
    with pytest.raises(RuntimeError, match="built outside the `scope\\(\\)`"):
        trace(strategy, lambda: layer(tf.ones([3, 12])))()


# Drift


def test_weights_that_drift_apart_are_named():
    class Careless(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(name="scale", shape=(shape[-1],), initializer="ones")

        def call(self, x):
            return x * self.scale * (regions.tensor_rank() + 1.0)  # ranks compute different things, and nobody says so

    strategy = strategy_on(2, tensor_parallel_size=2, check_drift_every=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((12,)), Careless(name="careless")])
        model.compile("sgd", "mse")
    model.train_on_batch(vectors[0], vectors[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="drifted apart(.|\n)*careless/scale"):
        model.train_on_batch(vectors[0], vectors[0])
