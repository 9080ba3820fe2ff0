"""Models of all the kinds that Keras saves differently."""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

X = np.random.default_rng(0).normal(size=(12, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(12, 3)).astype("float32")


def sequential():
    return keras.Sequential([keras.Input((5,)), layers.Dense(4, activation="relu"), layers.Dropout(0.5), layers.Dense(3)])


def nested():
    inner_input = keras.Input((4,))
    inner = keras.Model(inner_input, layers.BatchNormalization()(layers.Dense(4)(inner_input)), name="inner")
    first, second = keras.Input((5,)), layers.Dense(4)
    return keras.Model(first, layers.Dense(3)(inner(inner(second(first)))))


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.towers = {"b": [layers.Dense(4), layers.Dense(4)], "a": layers.Dense(4)}
        self.head = layers.Dense(3)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return self.head(self.towers["a"](x) + sum(tower(x) for tower in self.towers["b"])) * self.scale


@keras.saving.register_keras_serializable("tests")
class OwnFormat(layers.Layer):
    """Saves its variables backwards and by name, the sum too, and one in an asset."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        self.bias = self.add_weight(shape=(3,), name="bias")
        self.table = self.add_weight(shape=(2,), name="table", trainable=False)  # in the asset only

    def call(self, x):
        return x @ self.kernel + self.bias

    def save_own_variables(self, store):
        store["bias"] = self.bias
        if "kernel" not in store:
            store["kernel"] = self.kernel.numpy()
        store["sum"] = np.sum(keras.ops.convert_to_numpy(self.kernel))
        assert len(store.keys()) == len(store) == 3

    def load_own_variables(self, store):
        self.bias.assign(store["bias"])
        self.kernel.assign(store["kernel"])
        assert np.isclose(store["sum"], np.sum(store["kernel"]))

    def save_assets(self, directory):
        np.save(os.path.join(directory, "table.npy"), self.table.numpy())

    def load_assets(self, directory):
        self.table.assign(np.load(os.path.join(directory, "table.npy")))


def own_format():
    return keras.Sequential([keras.Input((5,)), layers.Dense(4), OwnFormat()])


def with_vocabulary():
    """A layer of Keras that has assets."""
    lookup = layers.StringLookup(output_mode="count")
    lookup.adapt(tf.constant([["a"], ["b"], ["a"]]))
    return keras.Sequential([keras.Input((5,), dtype="string"), lookup, layers.Dense(3)])


BUILDS = {
    "sequential": sequential,
    "nested": nested,
    "subclassed": Subclassed,
    "own_format": own_format,
}


def compiled(build):
    """Returns the model compiled, with the variables of optimizer and metrics, and no variable at its initial value."""
    keras.utils.set_random_seed(7)
    model = build()
    loss = keras.losses.MeanSquaredError()
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss, metrics=["mae"], run_eagerly=True)  # one step: no trace
    model.fit(X, Y, batch_size=12, verbose=0)
    generator = np.random.default_rng(3)
    for variable in model.weights:
        if "float" in variable.dtype:
            variable.assign(generator.normal(size=variable.shape))
    return model


def state(model):
    """Returns the values of the variables of the model and its optimizer that Keras saves in every format.

    Not the states of seed generators, which it never saves, nor metrics, nor what stands in an asset.
    """
    variables = model.weights + model.optimizer.variables
    return [np.asarray(v.value) for v in variables if not v.path.endswith(("seed_generator_state", "table"))]
