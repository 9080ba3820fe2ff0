"""Keras 2 under a tfdist strategy is refused at once: it trained on a mean of the devices' means."""

import sys
import types

import keras
import pytest
from training import strategy_for

import tfdist


@pytest.mark.parametrize("value", ["1", "True", "true"])
def test_the_environment(monkeypatch, value):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", value)
    with pytest.raises(NotImplementedError, match=r"TF_USE_LEGACY_KERAS='.*' ?\. Use Keras 3: `import keras`"):
        tfdist.ShardedStrategy(["CPU:0", "CPU:1"])
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    tfdist.ShardedStrategy(["CPU:0", "CPU:1"])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_variable_of_a_layer(monkeypatch, stage):
    """As a layer of `tf_keras` makes it, which no test installs: by code of that package."""
    package = types.ModuleType("tf_keras")
    layers = types.ModuleType("tf_keras.src.layers")
    exec("import tensorflow as tf\ndef build(): return tf.Variable(tf.ones([3]), name='kernel')", vars(layers))
    strategy = strategy_for(2, stage)
    with strategy.scope():
        layers.build()  # there is no Keras 2 yet
    monkeypatch.setitem(sys.modules, "tf_keras", package)
    with strategy.scope():
        keras.layers.Dense(2).build((None, 3))
        with pytest.raises(
            NotImplementedError, match=r"`tf_keras` \(Keras 2\) makes a variable.*variable='kernel'.*import keras"
        ):
            layers.build()
    layers.build()
