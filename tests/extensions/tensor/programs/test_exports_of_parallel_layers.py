"""What is exported of tensor-parallel layers: TensorFlow without tfdist serves it, with the same outputs."""

import keras
import pytest
from training import strategy_for

import tfdist
from tests.devices import of_cpus
from tests.programs.saving.test_exports import assert_tensorflow_serves, trained

pytestmark = pytest.mark.timeout(300)


def sharded_layers(strategy):
    with strategy.scope():
        layers = [tfdist.layers.ColumnParallelDense(8, activation="relu"), tfdist.layers.RowParallelDense(3)]
        model = keras.Sequential([keras.Input((5,)), *layers])
    return trained(model, strategy)


@of_cpus("it starts a process")
@pytest.mark.exhaustive
def test_tensorflow_without_tfdist_serves_it(tmp_path):
    models = {"sharded-layers-3": lambda: sharded_layers(strategy_for(4, 3, tensor_parallel_size=2))}
    assert_tensorflow_serves(models, (), tmp_path)
