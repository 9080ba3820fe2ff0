"""Iterators over a strategy's devices: which datasets are tuned, and the private names that decide it."""

import inspect

import pytest
import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import input_lib
from tensorflow.python.eager import context

import tfdist
from tfdist.data import device_iterators


def tuning_of_what_is_prefetched(strategy, monkeypatch):
    """Returns whether each device's dataset may be tuned, of the iterators of two datasets of `strategy`."""
    made = []
    original = tf.data.Dataset.__iter__
    monkeypatch.setattr(tf.data.Dataset, "__iter__", lambda self: made.append(self) or original(self))
    dataset = tf.data.Dataset.range(8).batch(4)
    list(strategy.experimental_distribute_dataset(dataset))
    list(strategy.distribute_datasets_from_function(lambda context: dataset))
    return [dataset.options().autotune.enabled for dataset in made]


def test_only_those_of_tfdist_are_not_tuned(cpus, monkeypatch):
    assert tuning_of_what_is_prefetched(tfdist.ShardedStrategy(cpus[:2]), monkeypatch) == [False] * 4
    assert tuning_of_what_is_prefetched(tf.distribute.MirroredStrategy(cpus[:2]), monkeypatch) == [None] * 4


def test_the_users_dataset_keeps_its_tuning(cpus):
    distributed = tfdist.ShardedStrategy(cpus[:2]).experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))
    assert [dataset.options().autotune.enabled for dataset in distributed._cloned_datasets] == [None]


@pytest.mark.parametrize("from_function", [False, True])
def test_they_are_tensorflows_datasets(cpus, from_function):
    strategy, dataset = tfdist.ShardedStrategy(cpus[:2]), tf.data.Dataset.range(8).batch(4)
    seen = []
    if from_function:
        distributed = strategy.distribute_datasets_from_function(lambda context: dataset)
    else:
        distributed = strategy.experimental_distribute_dataset(dataset)
    assert isinstance(
        distributed, input_lib.DistributedDatasetsFromFunction if from_function else tf.distribute.DistributedDataset
    )

    @tf.function
    def total(distributed):
        seen.append(type(distributed))
        total = tf.constant(0, tf.int64)
        for batch in distributed:
            total += sum(tf.reduce_sum(part) for part in strategy.experimental_local_results(batch))
        return total

    assert int(total(distributed)) == int(total(distributed)) == 28
    assert seen == [type(distributed)]


def test_slack_and_no_buffer(cpus):
    strategy, options = tfdist.ShardedStrategy(cpus[:2]), tf.data.Options()
    options.experimental_slack = True
    dataset = tf.data.Dataset.range(8).batch(4).with_options(options)
    for size in (0, 1, 3):
        how = tf.distribute.InputOptions(experimental_per_replica_buffer_size=size)
        batches = [strategy.experimental_local_results(batch) for batch in strategy.experimental_distribute_dataset(dataset, how)]
        assert [[part.numpy().tolist() for part in batch] for batch in batches] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_base_classes():
    names = ["shard_num", "multi_device_iterator_resource", "incarnation_id", "source_device", "element_spec"]
    made = multi_device_iterator_ops._PerDeviceGenerator
    assert parameters(made.__init__) == ["self", *names, "iterator_is_anonymous"]
    source = inspect.getsource(made)
    for name in ("init", "next", "finalize"):
        assert f"self._{name}_func = " in source and f"self._{name}_captured_args = " in source
    assert "self._next_captured_args = self._next_captured_args + [" in source, "generators keep their iterator alive"
    names = ["self", "dataset", "worker", "devices", "components", "element_spec", "options", "canonicalize_devices"]
    assert parameters(input_lib._SingleWorkerOwnedDatasetIterator.__init__) == names
    assert "self._create_owned_multi_device_iterator()" in inspect.getsource(input_lib._SingleWorkerOwnedDatasetIterator)
    components = inspect.getsource(multi_device_iterator_ops.OwnedMultiDeviceIterator)
    assert "self._device_iterators = components[1:]" in components


def test_the_base_class_of_the_iterator():
    """What tfdist's hands on in TensorFlow's attribute, and the names of what it calls."""
    base, spec = input_lib.DistributedIterator, input_lib.DistributedIteratorSpec
    attribute = "enable_get_next_as_optional"
    assert attribute in parameters(base.__init__) and attribute in parameters(spec.__init__)
    assert f"{attribute}=self._{attribute}" in inspect.getsource(spec.__mro__[1])
    assert "self.sanity_check_type(" in inspect.getsource(spec.is_subtype_of)
    assert f"if not self._{attribute}:\n      return self._get_next_no_partial" in inspect.getsource(base.get_next)
    assert parameters(input_lib._create_per_replica) == ["value_list", "strategy"]
    assert parameters(input_lib._create_distributed_tensor_spec) == ["strategy", "tensor_spec"]
    assert "anonymous resources" in context.anonymous_name.__doc__


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
    assert all(kept[0]["next_func"]._inference_function._bound_context is context.context() for kept in before.values())
    monkeypatch.setattr(context, "_context", context.Context())
    assert device_iterators._kept() == {}
