"""Iterators over a strategy's devices: which datasets are tuned, and the private names that decide it."""

import inspect

import pytest
import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import input_lib
from tensorflow.python.eager import context

import tfdist
from tfdist.data import device_iterators


def made_for(strategy, monkeypatch):
    """Returns the options of the devices' datasets of an iterator over `strategy`."""
    made = []
    create = multi_device_iterator_ops._create_device_dataset

    def note(*args):
        made.append(create(*args))
        return made[-1]

    monkeypatch.setattr(multi_device_iterator_ops, "_create_device_dataset", note)
    dataset = tf.data.Dataset.range(8).batch(4)
    assert len(list(strategy.experimental_distribute_dataset(dataset))) == 2
    list(strategy.distribute_datasets_from_function(lambda context: dataset))
    return [dataset.options().autotune.enabled for dataset in made]


def test_only_those_of_tfdist_are_not_tuned(cpus, monkeypatch):
    assert made_for(tfdist.ShardedStrategy(cpus[:2]), monkeypatch) == [False] * 4
    assert made_for(tf.distribute.MirroredStrategy(cpus[:2]), monkeypatch) == [None] * 4


def test_the_users_dataset_keeps_its_tuning(cpus):
    distributed = tfdist.ShardedStrategy(cpus[:2]).experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))
    assert [dataset.options().autotune.enabled for dataset in distributed._cloned_datasets] == [None]


@pytest.mark.parametrize("owner", [input_lib.DistributedDataset, input_lib.DistributedDatasetsFromFunction])
def test_where_iterators_are_made(owner):
    assert owner.__iter__._tfdist_original.__module__.startswith("tensorflow.python.distribute")
    assert "_strategy" in inspect.getsource(owner.__init__)


def test_what_makes_a_devices_dataset():
    original = multi_device_iterator_ops._create_device_dataset._tfdist_original
    names = ["prototype_ds", "incarnation_id", "prefetch_buffer_size", "experimental_slack"]
    assert list(inspect.signature(original).parameters) == names
    source = inspect.getsource(multi_device_iterator_ops.OwnedMultiDeviceIterator)
    assert "_create_device_dataset(" in source


def signature(owner):
    return list(inspect.signature(owner.__init__._tfdist_original).parameters)


def test_what_traces_the_functions_of_a_device():
    names = ["shard_num", "multi_device_iterator_resource", "incarnation_id", "source_device", "element_spec"]
    made, copied = multi_device_iterator_ops._PerDeviceGenerator, multi_device_iterator_ops._ReincarnatedPerDeviceGenerator
    assert signature(made) == ["self", *names, "iterator_is_anonymous"]
    assert signature(copied) == ["self", "per_device_dataset", "incarnation_id"]
    source = inspect.getsource(made)
    for name in ("init", "next", "finalize"):
        assert f"self._{name}_func = " in source and f"self._{name}_captured_args = " in source
    assert "self._next_captured_args = self._next_captured_args + [" in source, "generators keep their iterator alive"


def test_functions_are_traced_once(cpus, monkeypatch):
    """Iterators that live side by side, over elements of one kind and of another, give each device its own elements."""
    kept = {}
    monkeypatch.setattr(device_iterators, "_kept", lambda: kept)
    strategy = tfdist.ShardedStrategy(cpus[:3])

    def read(iterator):
        return [strategy.experimental_local_results(batch) for batch in iterator]

    def distributed(*values):
        names = tf.data.Dataset.from_tensor_slices(tuple(tf.constant(value) for value in values))
        return strategy.experimental_distribute_dataset(names.batch(6))

    numbers, texts = distributed(range(12)), distributed([f"{i}" for i in range(7)])
    first = iter(numbers)
    assert len(kept) == 3
    second, third, words = iter(numbers), iter(distributed(range(100, 115))), iter(texts)
    assert len(kept) == 6
    assert [[part[0].numpy().tolist() for part in batch] for batch in read(first)] == [
        [[0, 1], [2, 3], [4, 5]],
        [[6, 7], [8, 9], [10, 11]],
    ]
    assert [part[0].numpy().tolist() for part in read(third)[2]] == [[112], [113], [114]]
    assert len(read(second)) == 2
    assert [part[0].numpy().tolist() for part in read(words)[1]] == [[b"6"], [], []]


def test_functions_go_with_the_context_that_knows_them(cpus, monkeypatch):
    """Of another context, as Keras's own distribution tests make it, they are traced again: see tests/keras_suite."""
    iter(tfdist.ShardedStrategy(cpus[:2]).experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4)))
    before = device_iterators._kept()
    assert before and device_iterators._kept() is before
    assert all(kept.next[0]._inference_function._bound_context is context.context() for kept in before.values())
    monkeypatch.setattr(context, "_context", context.Context())
    assert device_iterators._kept() == {}
