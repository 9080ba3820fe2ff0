"""What a step assigns of activations that tensor ranks have gathered and reduced: of all rows, once."""

import warnings

import keras
import pytest
from grids import exhaustive
from keras import layers, ops

import tfdist
from tests.programs.comparing import assert_as_on_one_device
from tests.programs.statistics.test_assigned_statistics import fitted, sgd

pytestmark = pytest.mark.as_traced


class Counting(layers.Layer):
    """Adds up what it is given, over the rows, and passes it on."""

    def build(self, shape):
        self.total = self.add_weight(name="total", shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x):
        self.total.assign_add(ops.sum(x, 0))
        return x


def counts_behind_parallel_layers(strategy):
    """Of activations that tensor ranks have gathered and reduced: they have the same rows, data ranks others."""

    def build():
        parallel = tfdist.layers.ColumnParallelDense(6, activation="tanh"), tfdist.layers.RowParallelDense(4)
        return keras.Sequential([keras.Input((5,)), parallel[0], Counting(), parallel[1], Counting(), layers.Dense(5)])

    return fitted(strategy, build, sgd, "inputs")


@pytest.mark.parametrize("zero_stage", [exhaustive(0), 3])
def test_tensor_ranks_share_their_rows(zero_stage):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is assigned what a device has computed")
        assert_as_on_one_device(counts_behind_parallel_layers, zero_stage, 4, tensor_parallel_size=2)
