"""What of a dataset's past must be read again, and how the epochs of Keras's iterators end."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers import data_adapters

from tfdist.extensions.resuming.position import EpochLog, PositionedIterator

X = np.arange(12, dtype="float32")[:, None]


def rows():
    return tf.data.Dataset.from_tensor_slices(X)


def with_noise(data):
    layer = keras.layers.GaussianNoise(0.1, seed=3)
    return data.map(lambda x: layer(x, training=True))


def through_python(data):
    return data.map(lambda x: tf.numpy_function(lambda value: value, [x], tf.float32))


def iterator(data, steps_per_epoch=None, **arguments):
    """Has what `must_be_read` looks at."""
    made = object.__new__(PositionedIterator)
    made.data_adapter, made.steps_per_epoch = data_adapters.get_data_adapter(data, **arguments), steps_per_epoch
    made._distributed_dataset = types.SimpleNamespace(given=made.data_adapter.get_tf_dataset())
    return made


MADE = {
    "in order": lambda data: data.batch(4),
    "shuffled": lambda data: data.shuffle(12).map(lambda x: x + tf.random.normal([1])).batch(4).prefetch(1).take(2),
    "padded": lambda data: data.shuffle(12).padded_batch(4).filter(lambda x: True).ignore_errors(),
    "cached": lambda data: data.cache().shuffle(12).batch(4),
    "the same order": lambda data: data.shuffle(12, reshuffle_each_iteration=False).repeat(2).batch(4),
    "interleaved": lambda data: tf.data.Dataset.range(3).shuffle(3).interleave(lambda i: data.shuffle(4).take(2)).batch(4),
    "unbatched": lambda data: data.batch(4).shuffle(3).unbatch().batch(2),
}
READ = {
    "repeated": lambda data: data.shuffle(12).repeat(2).batch(4),
    "shuffled twice": lambda data: data.shuffle(12).batch(4).shuffle(3),
    "cached behind": lambda data: data.shuffle(12).cache().batch(4),
    "concatenated": lambda data: data.shuffle(12).concatenate(data.shuffle(12)).batch(4),
    "a state of its own": lambda data: with_noise(data).batch(4),
    "hidden by TensorFlow": lambda data: data.shuffle(12).enumerate().map(lambda i, x: x).batch(4),
    "Python": lambda data: through_python(data).batch(4),
    "of TensorFlow 1": lambda _: tf.compat.v1.data.Dataset.from_tensor_slices(X).shuffle(12).repeat(2).batch(4),
}


@pytest.mark.parametrize("name", [*MADE, *READ])
def test_what_must_be_read(name):
    assert iterator({**MADE, **READ}[name](rows())).must_be_read() == (name in READ)


def test_one_iterator_for_many_epochs():
    assert iterator(rows().batch(4), steps_per_epoch=2).must_be_read()
    assert not iterator(rows().batch(4), steps_per_epoch=2).must_be_read(starts_anew=True)
    assert not iterator(rows().batch(4), steps_per_epoch=3).must_be_read()
    assert iterator(rows().batch(4).repeat(), steps_per_epoch=3).must_be_read()
    assert not iterator(X, batch_size=4, shuffle=True).must_be_read()
    assert iterator((X[:4],) for _ in range(3)).must_be_read()


def test_how_epochs_end():
    log = EpochLog()
    assert log.past() == log.past(with_current=True) == []
    for _ in range(2):
        assert list(log.follow("abc")) == ["a", "b", "c"]
    assert log.past() == [[2, None]]
    left = log.follow("abc")  # Keras leaves it when the data have run out
    assert next(left) == "a"
    assert log.past() == [[2, None]]
    assert log.past(with_current=True) == [[2, None], [1, 1]]
    assert list(log.follow("a")) == ["a"]
    assert log.past() == [[2, None], [1, 1], [1, None]]


def test_keras_enumerates_as_is_relied_upon():
    """An iterator for each epoch and one behind it, hooks of the data around it, and the names that `position` uses."""
    made, told = [], []

    class Batches(keras.utils.PyDataset):
        num_batches = 3

        def __getitem__(self, index):
            return (X[:2],)

        def on_epoch_begin(self):
            told.append("begin")

        def on_epoch_end(self):
            told.append("end")

    class Counting(PositionedIterator):
        def _get_iterator(self):
            made.append(1)
            return super()._get_iterator()

    one = Counting(tf.distribute.get_strategy(), Batches(workers=0))
    one.reset()
    told.clear()
    assert [step[:2] for step in one._enumerate_iterator()] == [(0, 0), (1, 1), (2, 2)]
    assert (len(made), told) == (2, ["begin", "end"])
    assert {"_epoch_iterator", "_num_batches", "data_adapter", "steps_per_epoch"} <= set(vars(one))
    assert hasattr(one.data_adapter, "enqueuer")
