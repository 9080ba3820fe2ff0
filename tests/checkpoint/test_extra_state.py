"""What a run needs beyond Keras's weights file: read from one model and put back into another, rank by rank."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops

from tests.devices import assert_same_bits
from tests.training import on_two_data_ranks
from tfdist.checkpoint.extra_state import extra_state, metrics_state, restore_extra_state, restore_metrics_state

pytestmark = pytest.mark.timeout(300)

X = np.random.default_rng(0).normal(size=(36, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, size=36)


class Noise(layers.Layer):
    """Draws from Keras's global generator, from one in a list, and counts in a variable of TensorFlow."""

    def __init__(self):
        super().__init__()
        self.generators = [keras.random.SeedGenerator(4)]
        self.count = tf.Variable(0.0, trainable=False)
        self.unseeded = True

    def call(self, x, training=None):
        if training:
            self.count.assign_add(1.0)
            x = x + 0.1 * keras.random.normal(ops.shape(x), seed=self.generators[0])
            if self.unseeded:
                x = x + 0.1 * keras.random.normal(ops.shape(x))
        return x


def build():
    keras.utils.set_random_seed(3)
    dense = layers.Dense(9, activation="relu")
    model = keras.Sequential([keras.Input((6,)), dense, layers.Dropout(0.3), Noise(), layers.Dense(3)])
    dense.enable_lora(2)
    return model


def compiled(strategy, optimizer, wrap):
    with strategy.scope():
        model = wrap(build())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)])
    model.optimizer.build(model.trainable_variables)
    return model


def every_rank(model):
    """Returns what each rank stores of every variable, those of the metrics too."""
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [(v.path, [one.numpy() for one in v._value.values]) for v in variables]


def assert_same(ours, theirs):
    for (name, mine), (_, other) in zip(ours, theirs, strict=True):
        for rank, (part, expected) in enumerate(zip(mine, other, strict=True)):
            assert_same_bits(part, expected, f"{name} on rank {rank}")


SETTINGS = [
    exhaustive({"zero_stage": 3}),  # below, from a checkpoint of TensorFlow
    exhaustive({"zero_stage": 0}),
    exhaustive({"zero_stage": 1}),
    exhaustive({"zero_stage": 2}),
    exhaustive({"zero_stage": 1, "tensor_parallel_size": 2}),
]


@pytest.mark.as_traced
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_model_goes_on_in_another(settings, tmp_path, cpus):
    assert_a_model_goes_on_in_another(lambda: on_two_data_ranks(cpus, settings), tmp_path)


def assert_a_model_goes_on_in_another(make_strategy, tmp_path, wrap=lambda model: model):
    """In the middle of an accumulation and of an epoch: what both models do then is the same, bit by bit."""

    def made():
        adam = keras.optimizers.Adam(0.01, gradient_accumulation_steps=4, use_ema=True)
        return compiled(make_strategy(), keras.optimizers.LossScaleOptimizer(adam), wrap)

    def steps(model, number):
        return [model.train_on_batch(X[step * 6 : step * 6 + 12], Y[step * 6 : step * 6 + 12]) for step in range(number)]

    keras.utils.clear_session()  # the global generator, too
    path = str(tmp_path / "model.weights.h5")
    first = made()
    steps(first, 2)
    first.save_weights(path)
    extra, metrics, saved = extra_state(first), metrics_state(first), every_rank(first)
    logs = steps(first, 3)
    second = made()
    steps(second, 1)
    second.load_weights(path)
    restore_extra_state(second, extra)
    restore_metrics_state(second, metrics)
    assert_same(every_rank(second), saved)
    assert_same_bits(steps(second, 3), logs)
    assert_same(every_rank(second), every_rank(first))


def several():
    inner = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(0.1, momentum=0.9), {".*kernel": keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)}
    )
    return keras.optimizers.MultiOptimizer(inner)


@pytest.mark.as_traced
@pytest.mark.parametrize("settings", [{"zero_stage": 3}], ids=str)
def test_checkpoints_of_tensorflow_have_seeds_and_optimizers_in_optimizers(settings, tmp_path, cpus):
    assert_checkpoints_have_seeds_and_optimizers(lambda: on_two_data_ranks(cpus, settings), several, tmp_path)


def assert_checkpoints_have_seeds_and_optimizers(make_strategy, optimizer, tmp_path, wrap=lambda model: model):
    """A custom training loop goes on from `tf.train.Checkpoint`, bit by bit, between two updates of an accumulation, too."""

    def made():
        return compiled(make_strategy(), optimizer(), wrap)

    def steps(model, number):
        return [model.train_on_batch(X[step * 6 : step * 6 + 12], Y[step * 6 : step * 6 + 12])[0] for step in range(number)]

    keras.utils.clear_session()
    first = made()
    first.layers[2].unseeded = False
    steps(first, 3)
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(str(tmp_path / "checkpoint"))
    second = made()
    second.layers[2].unseeded = False
    tf.train.Checkpoint(model=second, optimizer=second.optimizer).restore(path).assert_consumed()
    second.reset_metrics(), first.reset_metrics()
    assert_same_bits(steps(second, 3), steps(first, 3))
    assert_same(every_rank(second), every_rank(first))
