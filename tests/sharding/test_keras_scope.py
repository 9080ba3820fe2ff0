"""What Keras knows in a thread: the layers that are called, the innermost first, and in which dtype they read variables."""

import keras
import tensorflow as tf

from tfdist.sharding import keras_scope


class Looking(keras.layers.Layer):
    """Notes in `found` what is known while it is called."""

    def __init__(self, found=None, **settings):
        super().__init__(**settings)
        self.inner, self.note = keras.layers.Dense(3), lambda *known: found.append(known)

    def build(self, shape):
        self.scale = self.add_weight(shape=(), name="scale")
        self.inner.build(shape)
        self.built = True

    def call(self, x):
        self.note(keras_scope.current_layer(), keras_scope.outermost_layer(), keras_scope.autocast_dtype())
        return self.inner(x) * self.scale


def test_layers_that_are_called():
    found = []
    layer = Looking(found, dtype="mixed_bfloat16")
    model = keras.Sequential([layer])
    model(tf.ones([1, 5]))
    assert found[-1] == (layer, model, tf.bfloat16)
    assert keras_scope.current_layer() is keras_scope.outermost_layer() is keras_scope.autocast_dtype() is None
    assert set(keras_scope.layers_within(model)) >= {model, layer, layer.inner} and keras_scope.layers_within(None) == []


def test_a_layer_owns_what_it_made_itself():
    layer = Looking(dtype="mixed_bfloat16")
    layer.build((None, 5))
    layer.trainable = False
    assert [(own[1], own[2]) for own in keras_scope.own_variables(layer)] == [(layer.scale, True)]
    assert len(keras_scope.own_variables(layer.inner)) == 2
    optimizer = keras.optimizers.SGD()
    optimizer.build([layer.scale])
    assert keras_scope.own_variables(optimizer) == []


def test_the_state_of_a_thread_is_lent_and_given_back():
    with keras.name_scope("outer", caller="outer"):
        state = keras_scope.thread_state()
        callers = keras_scope.callers()
    with keras_scope.thread_state_of({**state, "tfdist_test": 1}):
        assert keras_scope.thread_state()["tfdist_test"] == 1
    assert callers == ["outer"] and keras_scope.callers() == [] and "tfdist_test" not in keras_scope.thread_state()
