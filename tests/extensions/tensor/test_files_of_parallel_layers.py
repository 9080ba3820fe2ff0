"""Files of models with parallel layers, and of the same models of Keras layers."""

import keras
import numpy as np
import pytest

from tfdist import ShardedStrategy, layers, parallelize


class Wide(keras.layers.Dense):
    """A layer of the user's own."""


def build(dense_in=keras.layers.Dense, dense_out=keras.layers.Dense, embedding=keras.layers.Embedding):
    tokens = keras.Input((5,), dtype="int32")
    x = embedding(10, 8)(tokens)
    x = x + keras.layers.MultiHeadAttention(2, 4)(x, x)
    x = Wide(12, activation="relu")(dense_in(12, activation="relu")(x))
    return keras.Model(tokens, dense_out(4)(x))


def assert_same(model, other):
    for mine, theirs in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


@pytest.mark.parametrize("suffix", [".weights.h5", ".keras"])
def test_files_are_those_of_the_plain_model(cpus, tmp_path, suffix):
    keras.utils.set_random_seed(1)
    with ShardedStrategy(cpus[:2], tensor_parallel_size=2).scope():
        model = build()
        parallelize(model, {"embedding": "vocab", "attention": "column", "wide": "row", "dense": "column"}, print_fn=None)
    plain = build()
    assert not np.array_equal(plain.weights[0].numpy(), model.weights[0].numpy())
    for source, target in ((model, plain), (plain, model)):
        target.set_weights([np.zeros(weight.shape, "float32") for weight in target.weights])
        path = tmp_path / f"{source.name}{suffix}"
        source.save_weights(path) if suffix == ".weights.h5" else source.save(path)
        target.load_weights(path)
        assert_same(source, target)
        assert any(weight.numpy().any() for weight in source.weights)


def test_layers_of_the_library_are_saved_as_those_of_keras(tmp_path):
    model = build(layers.ColumnParallelDense, layers.RowParallelDense, layers.VocabParallelEmbedding)
    model.save_weights(tmp_path / "model.weights.h5")
    plain = build()
    plain.load_weights(tmp_path / "model.weights.h5")
    assert_same(model, plain)
