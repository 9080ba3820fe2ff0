"""What workers assign outside of steps: whoever hears of another's assignment says so when it has come to the same program."""

import types

import numpy as np
import pytest
import tensorflow as tf

from tfdist.runtime import Turns
from tfdist.runtime.outside_writes import digest_of, is_same


class Workers:
    """Two workers, whose words arrive at once, or when `deliver` is called."""

    def __init__(self, is_late=False):
        self.is_late, self.late, self.said, self.listeners = is_late, [], [], []
        self.workers = [Turns(self._coordination(index)) for index in range(2)]

    def _coordination(self, index):
        cluster = types.SimpleNamespace(tasks=("worker 0", "worker 1"), task=f"worker {index}")
        tell, listen = (lambda _, told: self._tell(index, told)), (lambda _, heard: self.listeners.append(heard))
        return types.SimpleNamespace(cluster=cluster, tell=tell, listen=listen, fail=lambda words, fix: self.said.append(words))

    def _tell(self, index, told):
        self.late.append((index, told))
        if not self.is_late:
            self.deliver()

    def deliver(self):
        while self.late:
            index, told = self.late.pop(0)
            self.said.append(self.listeners[1 - index](index, told))

    def step(self, index):
        with self.workers[index].taken(types.SimpleNamespace(name="step")):
            pass

    def words(self):
        return " ".join(filter(None, self.said))


ORDERS = [(0, 1), (1, 0)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("writes", "words"),
    [
        (([], []), ""),
        (([("kernel", 1.0)], [("kernel", 1.0)]), ""),
        (([("kernel", 1.0)], []), "'kernel' on worker 0, and not on worker 1"),
        (([], [("kernel", 1.0)]), "'kernel' on worker 1, and not on worker 0"),
        (([("kernel", 1.0)], [("kernel", 2.0)]), "'kernel' on worker"),
        (([("kernel", 1.0)], [("bias", 1.0)]), "' on worker"),
        (([("kernel", 1.0), ("bias", 1.0)], [("kernel", 1.0)]), "'bias' on worker 0, and not on worker 1"),
        (([("v", 1.0)] * 200, [("v", 1.0)] * 200), ""),
        (([("v", 1.0)] * 200, [("v", 1.0)] * 199 + [("v", 2.0)]), "and another on worker"),
        (([("v", 1.0)] * 200, [("v", 1.0)] * 100 + [("v", 2.0)] + [("v", 1.0)] * 99), "and another on worker"),
    ],
)
def test_who_has_assigned_what(order, is_late, writes, words):
    both = Workers(is_late)
    for index in order:
        both.step(index)
    for index in order:
        for name, value in writes[index]:
            both.workers[index].note(sum(map(ord, name)), f"{name}", np.float32(value))
        both.step(index)
        both.step(index)  # it may be ahead
    both.deliver()
    assert words in both.words() and bool(both.words()) == bool(words)


def test_a_worker_that_is_behind_is_not_blamed():
    both = Workers()
    both.workers[0].note(3, "kernel", 1.0)
    both.step(0)
    assert not both.words()  # worker 1 has not come to this step, and may assign it
    both.workers[1].note(3, "kernel_1", 1.0)
    both.step(1)
    assert not both.words()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(3), np.zeros(4)),
        (np.zeros((2, 3)), np.ones((2, 3))),
        (np.array([1, 2]), np.array([2, 1])),
        (np.array(["a", "b"], object), np.array(["b", "a"], object)),
        (np.float32(0.1), np.float32(0.1001)),
        (np.zeros((3, 4))[:, 1:3], np.ones((3, 4))[:, 1:3]),
        (np.ones(3) * 1j, np.ones(3)),
        (tf.ones(3, tf.bfloat16), tf.zeros(3, tf.bfloat16)),
        (tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])), tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]))),
        (np.arange(200_000.0), np.roll(np.arange(200_000.0), 2**16)),
    ],
)
def test_digests(one, other):
    same = [1, "v", digest_of(one)]
    assert is_same(same, [1, "v_1", digest_of(one)]) and not is_same(same, [1, "v", digest_of(other)])
    assert not is_same(same, [2, "v", digest_of(one)])


def test_the_last_bits_of_floats_may_differ():
    values = np.random.default_rng(1).normal(size=100_000).astype("float32")
    near = np.nextafter(values, np.float32(9))
    assert is_same([1, "v", digest_of(values)], [1, "v", digest_of(near)])
    near[77] += 1.0
    assert not is_same([1, "v", digest_of(values)], [1, "v", digest_of(near)])
