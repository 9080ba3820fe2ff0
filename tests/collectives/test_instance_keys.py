"""Instance keys: the same on every worker, whatever it has traced before."""

import itertools
import random

import pytest
import tensorflow as tf

from tfdist.collectives import CollectiveRecord
from tfdist.collectives.instance_keys import KEYS_PER_COLLECTIVE, InstanceKeys, log2_ceiling

OPS, GROUPS, SHAPES = ("all_reduce", "all_gather", "broadcast"), ((0, 1), (0, 1, 2)), ((3,), (3, 4), (), (None, 4))
RECORDS = [
    CollectiveRecord(op, ranks, shape, dtype, "x", source)
    for op, ranks, shape, dtype, source in itertools.product(OPS, GROUPS, SHAPES, ("float32", "int64"), (None, 1))
]


def test_the_order_of_tracing_does_not_matter():
    one, other = InstanceKeys(), InstanceKeys()
    shuffled = random.Random(0).sample(RECORDS, len(RECORDS))
    theirs = {id(record): other.key(record) for record in shuffled}
    assert {id(record): one.key(record) for record in RECORDS} == theirs


def test_every_kind_has_its_own_keys():
    keys = InstanceKeys()
    taken = []
    for record in RECORDS:
        first = keys.key(record)
        taken += range(first, first + (KEYS_PER_COLLECTIVE if None in record.shape else 1))
    assert len(set(taken)) == len(taken)
    assert min(taken) > 0  # 0 is the question about the order of a group
    assert max(taken) < 1 << 31


def test_a_kind_keeps_its_key_and_labels_do_not_count():
    keys = InstanceKeys()
    record = CollectiveRecord("all_gather", (0, 1), (8,), "float32", "unshard/dense")
    assert keys.key(record) == keys.key(record)
    assert keys.key(CollectiveRecord("all_gather", (0, 1), (8,), "float32", "unshard/other")) == keys.key(record)


@pytest.mark.parametrize("shape", [(5,), (None, 5)])
def test_kinds_that_meet_are_kept_apart(shape, monkeypatch):
    class Digest:
        def digest(self):
            return b"\xff" * 32

    monkeypatch.setattr("tfdist.collectives.instance_keys.hashlib.sha256", lambda _: Digest())
    keys = InstanceKeys()
    found = [keys.key(CollectiveRecord(op, (0, 1), shape, "float32")) for op in ("all_reduce", "all_gather", "all_to_all")]
    assert len(set(found)) == 3
    if None in shape:
        assert all(abs(one - other) >= KEYS_PER_COLLECTIVE for one, other in itertools.combinations(found, 2))


def test_every_length_has_a_key_of_its_own():
    lengths = [1, 2, 3, 4, 5, 8, 9, 1 << 30]
    assert [int(log2_ceiling(tf.constant(length))) for length in lengths] == [0, 1, 2, 2, 3, 3, 4, 30]
    assert max(int(log2_ceiling(tf.constant((1 << 31) - 1))), 30) < KEYS_PER_COLLECTIVE
