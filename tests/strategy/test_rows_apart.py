"""Operations that need all rows of a batch, of which a device has a part: an error says what to do, and that is exact."""

import keras
import numpy as np
import pytest
from training import one_device, strategy_for

RNG = np.random.default_rng(2)
NODES, LINKS = RNG.normal(size=(8, 5)).astype("float32"), (RNG.random((8, 8)) < 0.4).astype("float32")
TARGETS = RNG.normal(size=(8, 3)).astype("float32")


class GraphConvolution(keras.layers.Layer):
    """Sums over the neighbours of each of a graph's nodes, which are the rows of the batch."""

    def build(self, shape):
        self.dense = keras.layers.Dense(3)
        self.dense.build(shape)

    def call(self, x):
        return keras.ops.matmul(keras.ops.convert_to_tensor(LINKS), self.dense(x))

    def compute_output_shape(self, shape):
        return (*shape[:-1], 3)


def made(strategy):
    keras.utils.set_random_seed(4)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), GraphConvolution()])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def test_a_graph_convolution_over_nodes():
    model = made(strategy_for(2, 3))
    with pytest.raises(ValueError, match="train_on_batch"):
        model.fit(NODES, TARGETS, batch_size=8, verbose=0)
    model, plain = made(strategy_for(2, 3)), made(one_device())
    for _ in range(2):
        loss, expected = model.train_on_batch(NODES, TARGETS), plain.train_on_batch(NODES, TARGETS)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for mine, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
