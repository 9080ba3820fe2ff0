"""TensorFlow's usual order: a checkpoint is restored right after the model is built, before the optimizer has any state.

The state is made in the first step, inside a rank, and gets the file's values then: all ranks' shards of it.
"""

import functools
import tempfile

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from training import BATCH, one_device, small, vectors

from tests.programs.comparing import assert_as_on_one_device

pytestmark = pytest.mark.as_traced

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "averages": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.9),
    "accumulation": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "owned": lambda: keras.optimizers.Lamb(0.01),
}


def made(strategy, optimizer):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        return small(), OPTIMIZERS[optimizer]()


def train(strategy, model, optimizer, is_traced, steps=3):
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def on_rank(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x)) / BATCH
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    def step(batch):
        return strategy.reduce("SUM", strategy.run(on_rank, args=batch), axis=None)

    step = tf.function(step) if is_traced else step
    batches = tf.data.Dataset.from_tensor_slices(vectors()).batch(BATCH, drop_remainder=True).take(steps)
    return [float(step(batch)) for batch in strategy.experimental_distribute_dataset(batches)]


def going_on(strategy, optimizer, is_traced=True, first=None, folder=None):
    """Three steps, saved (under `first`, if given); restored by whoever goes on, three steps more."""
    directory = folder or tempfile.mkdtemp()
    model, trained = made(first or strategy, optimizer)
    train(first or strategy, model, trained, is_traced)
    tf.train.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=trained), directory, 2).save()
    model, trained = made(strategy, optimizer)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=trained)
    status = checkpoint.restore(tf.train.CheckpointManager(checkpoint, directory, 2).latest_checkpoint)
    losses = train(strategy, model, trained, is_traced)
    status.assert_consumed()
    return losses, model.get_weights(), [variable.numpy() for variable in trained.variables]


@functools.cache
def program(*arguments):
    """Returns one function for equal arguments, so that one device runs it once."""
    return functools.wraps(going_on)(functools.partial(going_on, **dict(arguments)))


@pytest.mark.parametrize(
    ("optimizer", "zero_stage"),
    [
        exhaustive("adam", 0),
        exhaustive("adam", 1),
        exhaustive("adam", 3),
        ("averages", 1),
        exhaustive("averages", 3),
        ("accumulation", 0),
        exhaustive("accumulation", 1),
        exhaustive("accumulation", 2),
        exhaustive("accumulation", 3),
        exhaustive("owned", 1),
        ("owned", 3),
    ],
)
def test_a_restored_run_goes_on_as_on_one_device(optimizer, zero_stage):
    assert_as_on_one_device(program(("optimizer", optimizer)), zero_stage)


@pytest.mark.parametrize("zero_stage", [exhaustive(0), exhaustive(1), 3])
def test_a_file_of_one_device_in_an_eager_loop(zero_stage):
    assert_as_on_one_device(program(("optimizer", "adam"), ("is_traced", False), ("first", one_device())), zero_stage)
