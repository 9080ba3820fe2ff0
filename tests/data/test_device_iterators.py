"""Iterators over a strategy's devices: which datasets are tuned, and the private names that decide it."""

import inspect

import pytest
import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import input_lib

import tfdist


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
    assert owner.__iter__._tfdist_override.__module__.startswith("tensorflow.python.distribute")
    assert "_strategy" in inspect.getsource(owner.__init__)


def test_what_makes_a_devices_dataset():
    original = multi_device_iterator_ops._create_device_dataset._tfdist_override
    names = ["prototype_ds", "incarnation_id", "prefetch_buffer_size", "experimental_slack"]
    assert list(inspect.signature(original).parameters) == names
    source = inspect.getsource(multi_device_iterator_ops.OwnedMultiDeviceIterator)
    assert "_create_device_dataset(" in source
