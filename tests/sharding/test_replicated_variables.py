"""A variable that is not sharded is one of TensorFlow's own, and has a layout."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import values
from training import strategy_for

from tfdist.sharding import Layout, Partial, Shard, ShardedVariable

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [None, 2])
def test_every_floating_variable_of_layers_and_optimizers_has_a_layout(zero_stage, accumulation):
    strategy = strategy_for(2, zero_stage)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5), keras.layers.BatchNormalization()])
        optimizer = keras.optimizers.Nadam(gradient_accumulation_steps=accumulation, use_ema=True)
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
        optimizer.build(model.trainable_variables)
    variables = [variable.value for variable in [*model.variables, *optimizer.variables, *model.metrics_variables]]
    for variable in variables:
        assert variable.layout.shape == tuple(variable.shape), variable.name
        assert isinstance(variable, ShardedVariable) == variable.layout.is_sharded, variable.name
    for variable in model.trainable_variables:
        layout = variable.value.layout
        assert layout.is_data_sharded == (zero_stage == 3)
        assert optimizer._momentums[0].value.layout.is_data_sharded == (zero_stage >= 1)
    if accumulation:
        assert [v.value.layout.data == Partial() for v in optimizer._accumulated_gradients] == [zero_stage < 2] * 4


def test_it_stays_what_tensorflow_tests_for():
    with strategy_for(2, 2).scope():
        whole = tf.Variable(np.ones((2, 3), "float32"))
        summed = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM, trainable=False
        )
        anyhow = tf.Variable(np.ones((2, 3)), shape=tf.TensorShape(None))
    assert isinstance(whole, values.MirroredVariable) and "MirroredVariable" in type(whole).__name__
    assert isinstance(summed, values.SyncOnReadVariable)
    assert whole.layout == Layout((2, 3), whole.layout.mesh) and not whole.layout.is_sharded
    assert summed.layout == Layout((), whole.layout.mesh, data=Partial())
    assert type(anyhow) is values.MirroredVariable  # of no known shape
    whole.assign_add(np.ones((2, 3), "float32"))
    assert [component.numpy().sum() for component in whole.values] == [12, 12]
    summed.assign(3.0)
    assert summed.numpy() == 3
    assert not isinstance(whole.layout.data, Shard)
