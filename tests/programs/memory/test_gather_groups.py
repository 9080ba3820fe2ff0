"""What is gathered together at stage 3, with several layers in a group: a model's own, alike on all ranks."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import strategy_for

from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device
from tfdist.collectives import rank_program

GROUP_BYTES = 2**20  # all layers of these models in one group; not the default, which tests/conftest.py turns off
X, Y = np.random.default_rng(5).normal(size=(24, 7)).astype("float32"), np.arange(24) % 3


def dense(units, name, **settings):
    return keras.layers.Dense(units, name=name, activation="tanh", **settings)


def model_of(name, **settings):
    layers = [dense(5, f"{name}_hidden", **settings), dense(3, f"{name}_head", **settings)]
    return keras.Sequential([keras.Input((7,)), *layers], name=name)


def compiled(model):
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit(model):
    return model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]


def gathered(plan):
    """Returns the elements that rank 0 sends in each gather of a plan."""
    return [int(np.prod(record.shape)) for record in plan.records[0] if record.op == "all_gather"]


def shards(*layers):
    return sum(-(-int(np.prod(v.shape)) // 2) for layer in layers for v in layer.trainable_variables)


class CollectsGarbage(keras.layers.Layer):
    """Frees dead models where a rank is traced."""

    def call(self, x):
        if rank_program() is not None:
            gc.collect()
        return x


def a_model_dies_between_the_traces_of_two_ranks(strategy):
    with strategy.scope():
        layers = [dense(5, "hidden"), CollectsGarbage(), dense(3, "head")]
        model = compiled(keras.Sequential([keras.Input((7,)), *layers]))
        model_of("dead")
    return fit(model), state(model)


def lora_is_enabled_between_two_fits(strategy, compiles=True):
    with strategy.scope():
        model = compiled(model_of("model"))
        before = fit(model)
        model.layers[-1].enable_lora(2, a_initializer="ones")
        if compiles:
            compiled(model)
        return before, fit(model), state(model)


def lora_is_enabled_and_nothing_compiled(strategy):
    return lora_is_enabled_between_two_fits(strategy, compiles=False)


class Stack(keras.Model):
    def __init__(self, depth):
        super().__init__()
        self.blocks = [dense(7, f"block_{k}") for k in range(depth)]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def layers_come_and_go_between_fits(strategy):
    with strategy.scope():
        model = compiled(Stack(3))
        losses = [fit(model)]
        model.blocks.pop(1)
        losses.append(fit(compiled(model)))
        longer = keras.Sequential([keras.Input((7,)), *model.blocks, dense(7, "new")])
        losses.append(fit(compiled(longer)))
        return losses, longer.get_weights()


def one_layer_in_two_models(strategy):
    """Of a GAN whose generator is trained through a model of both, in one step with the discriminator."""
    with strategy.scope():
        generator = keras.Sequential([keras.Input((7,)), dense(5, "g_1"), dense(7, "g_2")])
        discriminator = keras.Sequential([keras.Input((7,)), dense(5, "d_1"), dense(1, "d_2")])
        both = keras.Sequential([keras.Input((7,)), generator, discriminator])
        optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2)]
        for optimizer, model in zip(optimizers, (generator, discriminator), strict=True):
            optimizer.build(model.trainable_variables)

    def rank_step(x):
        with tf.GradientTape(persistent=True) as tape:
            fooled = tf.reduce_sum(both(x[:, ::-1], training=True) ** 2) / 8
            found = tf.reduce_sum((discriminator(x, training=True) - 1) ** 2) / 8 - fooled
        optimizers[1].apply(tape.gradient(found, discriminator.trainable_variables), discriminator.trainable_variables)
        optimizers[0].apply(tape.gradient(fooled, generator.trainable_variables), generator.trainable_variables)
        return found

    step = tf.function(lambda x: strategy.reduce("SUM", strategy.run(rank_step, args=(x,)), axis=None))
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(8).repeat(2)
    return [float(step(x)) for x in strategy.experimental_distribute_dataset(dataset)], both.get_weights()


def weights_are_read_before_and_after_the_call(strategy):
    """By a penalty of the user's own, and by a layer that holds another's weights."""

    class Penalized(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            data = super().compute_loss(x, y, y_pred, sample_weight, training)
            return data + 0.0 * sum(tf.reduce_sum(v**2) for v in self.trainable_variables)

    with strategy.scope():
        model = compiled(Penalized([keras.Input((7,)), dense(5, "a", kernel_regularizer="l2"), dense(3, "b")]))
    return fit(model), state(model)


@pytest.mark.as_traced
@pytest.mark.parametrize("zero_stage", [exhaustive(0), 3])
@pytest.mark.parametrize(
    "program",
    [
        a_model_dies_between_the_traces_of_two_ranks,
        lora_is_enabled_between_two_fits,
        exhaustive(lora_is_enabled_and_nothing_compiled),
        exhaustive(layers_come_and_go_between_fits),
        one_layer_in_two_models,
        weights_are_read_before_and_after_the_call,
    ],
)
def test_as_on_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage, group_bytes=GROUP_BYTES)


@pytest.mark.parametrize("made", ["before", "after"])
def test_another_models_layers_are_not_gathered(made):
    strategy = strategy_for(2, 3, group_bytes=GROUP_BYTES)
    with strategy.scope():
        other = model_of("before")
        model = compiled(model_of("model"))
        other = other if made == "before" else model_of("after")
    fit(model)
    assert gathered(strategy.last_plan) == [shards(*model.layers)]
    other.predict(X, verbose=0)
    assert gathered(strategy.last_plan) == [shards(*other.layers)]


def test_a_part_of_a_model_gathers_its_layers_only():
    strategy = strategy_for(2, 3, group_bytes=GROUP_BYTES)
    with strategy.scope():
        model = compiled(keras.Sequential([keras.Input((7,)), dense(5, "first"), dense(4, "second"), dense(3, "third")]))
        features = keras.Model(model.inputs, model.layers[1].output)
    fit(model)
    assert gathered(strategy.last_plan) == [shards(*model.layers)]
    features.predict(X, verbose=0)
    assert gathered(strategy.last_plan) == [shards(*model.layers[:2])]


def test_models_within_a_model_share_its_groups():
    strategy = strategy_for(2, 3, group_bytes=GROUP_BYTES)
    with strategy.scope():
        inner = [keras.Sequential([dense(5, f"{name}_1"), dense(7, f"{name}_2")], name=name) for name in "ab"]
        model = compiled(keras.Sequential([keras.Input((7,)), *inner]))
    fit(model)
    assert gathered(strategy.last_plan) == [shards(*model.layers)]
