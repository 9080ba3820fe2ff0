"""What was put together is kept until it may have been written: within a limit, and in `gathered` whatever its size."""

import types

import keras
import tensorflow as tf

from tfdist.sharding.weight_cache import WeightCache


class Weight:
    """Of 5 numbers, 20 bytes."""

    dtype, is_parameter, values = tf.float32, True, [None, None]
    layout = types.SimpleNamespace(shape=(5,), mesh=types.SimpleNamespace(world_size=2))

    def __init__(self, number, cache):
        self.number, self.cache, self.count = number, cache, 0

    def assemble(self, _):
        self.count += 1
        return tf.fill([5], float(self.count))

    def read_value(self, is_called=True):
        with keras.name_scope("layer", caller=self if is_called else None):
            return self.cache.read(self, self.assemble)


def weights(limit_bytes, count=1):
    cache = WeightCache(limit_bytes)
    return cache, [Weight(number, cache) for number in range(count)]


def test_it_is_kept_until_it_is_written():
    cache, (one, other) = weights(40, 2)
    assert one.read_value() is one.read_value() and one.count == 1 and cache.kept_bytes == 20
    other.read_value()
    with cache.written(one.number):
        assert cache.kept_bytes == 20
    one.read_value(), other.read_value()
    assert (one.count, other.count) == (2, 1)
    cache.forget_all(at_calls=False)
    assert cache.kept_bytes == 0 and float(other.read_value()[0]) == 2


def test_the_limit():
    for limit, kept in ((19, 0), (20, 20), (39, 20), (40, 40)):
        cache, (one, other) = weights(limit, 2)
        one.read_value(), other.read_value()
        assert cache.kept_bytes == kept
    with cache.gathered([]):
        pass
    assert cache.kept_bytes == 40


def test_what_no_layer_reads_is_not_kept():
    cache, (one,) = weights(40)
    one.read_value(is_called=False)
    assert cache.kept_bytes == 0


def test_nothing_is_kept_that_was_read_while_something_was_written():
    cache, (one,) = weights(40)
    with cache.all_written():
        one.read_value()
    assert cache.kept_bytes == 0

    def assemble(_):
        with cache.written(one.number):  # of another thread
            return tf.zeros([5])

    with keras.name_scope("layer", caller=one):
        cache.read(one, assemble)
    assert cache.kept_bytes == 0


def test_gathered_blocks_keep_what_is_too_large():
    cache, (one, other) = weights(20, 2)
    other.read_value()
    with cache.gathered([one, other]):
        cache.forget(one.number)
        with cache.gathered([one]):
            assert cache.kept_bytes == 40
        assert cache.kept_bytes == 40, "the outer block keeps what the inner one has put together"
    assert cache.kept_bytes == 20 and other.count == 1, "what was kept before stays"
