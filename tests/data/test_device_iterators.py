"""Iterators over a strategy's devices: which datasets are tuned, and the private names that decide it."""

import collections
import gc
import inspect
import weakref

import pytest
import tensorflow as tf
from signatures import parameters
from tensorflow.python.data.ops import flat_map_op, multi_device_iterator_ops
from tensorflow.python.distribute import input_lib
from tensorflow.python.eager import context

import tfdist
from tests.devices import of_cpus
from tfdist.data import device_iterators, iterator, kept_functions, split_batches


@pytest.fixture
def own_memories(monkeypatch):
    """Devices are taken for such as do not share a memory."""
    for module in (device_iterators, iterator):
        monkeypatch.setattr(module, "are_cpus", lambda devices: False)


@pytest.fixture(params=["in turn", "own memories"])
def either_way(request):
    if request.param == "own memories":
        request.getfixturevalue("own_memories")


def tuning_of_what_is_prefetched(strategy, monkeypatch):
    """Returns whether each device's dataset may be tuned, of the iterators of two datasets of `strategy`."""
    made = []
    original = tf.data.Dataset.__iter__
    monkeypatch.setattr(tf.data.Dataset, "__iter__", lambda self: made.append(self) or original(self))
    dataset = tf.data.Dataset.range(8).batch(4)
    list(strategy.experimental_distribute_dataset(dataset))
    list(strategy.distribute_datasets_from_function(lambda context: dataset))
    return [dataset.options().autotune.enabled for dataset in made]


def test_only_those_of_tfdist_are_not_tuned(cpus, monkeypatch, own_memories):
    assert tuning_of_what_is_prefetched(tfdist.ShardedStrategy(cpus[:2]), monkeypatch) == [False] * 4
    assert tuning_of_what_is_prefetched(tf.distribute.MirroredStrategy(cpus[:2]), monkeypatch) == [None] * 4


def test_the_users_dataset_keeps_its_tuning(cpus):
    distributed = tfdist.ShardedStrategy(cpus[:2]).experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))
    assert [dataset.options().autotune.enabled for dataset in distributed._cloned_datasets] == [None]


@pytest.mark.usefixtures("either_way")
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


def test_slack_and_no_buffer(cpus, either_way):
    strategy, options = tfdist.ShardedStrategy(cpus[:2]), tf.data.Options()
    options.experimental_slack = True
    dataset = tf.data.Dataset.range(8).batch(4).with_options(options)
    for size in (0, 1, 3):
        how = tf.distribute.InputOptions(experimental_per_replica_buffer_size=size)
        batches = [strategy.experimental_local_results(batch) for batch in strategy.experimental_distribute_dataset(dataset, how)]
        assert [[part.numpy().tolist() for part in batch] for batch in batches] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@of_cpus("each GPU has an iterator, which copies ahead")
def test_cpus_share_one_iterator(cpus, monkeypatch):
    made = []
    original = tf.data.Dataset.__iter__
    monkeypatch.setattr(tf.data.Dataset, "__iter__", lambda self: made.append(self) or original(self))
    strategy, dataset = tfdist.ShardedStrategy(cpus), tf.data.Dataset.range(10).batch(8)
    distributed = strategy.experimental_distribute_dataset(dataset)
    batches = [[part.numpy().tolist() for part in strategy.experimental_local_results(batch)] for batch in distributed]
    assert batches == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8], [9], [], []]]
    assert made == distributed._cloned_datasets


@pytest.mark.usefixtures("either_way")
def test_a_traced_loop_takes_turns_in_order(cpus):
    """An iterator is given to a `tf.function` call after call, and asked in both ways; the last batch has too few pieces."""
    strategy = tfdist.ShardedStrategy(cpus[:3])
    found = iter(strategy.distribute_datasets_from_function(lambda context: tf.data.Dataset.range(16).batch(2)))
    traces = []

    def rows(batch):
        return [tf.reduce_sum(part) for part in strategy.experimental_local_results(batch)]

    @tf.function
    def two_batches(iterator):
        traces.append(1)
        return rows(iterator.get_next()), rows(iterator.get_next_as_optional().get_value())

    assert [[int(part) for part in batch] for batch in two_batches(found)] == [[1, 5, 9], [13, 17, 21]]
    assert [int(part) for part in rows(found.get_next_as_optional().get_value())] == [25, 29, 0]
    assert not found.get_next_as_optional().has_value()
    with pytest.raises(StopIteration):
        next(found)
    two_batches(iter(strategy.distribute_datasets_from_function(lambda context: tf.data.Dataset.range(40).batch(2))))
    assert len(traces) == 1


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
    source = inspect.getsource(input_lib.DistributedIteratorBase)
    called = {name for name in ("get_next_as_list", "get_next_as_optional_list") if f"self._iterators[i].{name}(" in source}
    assert len(called) == 2 and "self._iterators[i].get_next(" not in source
    source = inspect.getsource(flat_map_op._FlatMapDataset)
    assert "gen_dataset_ops.flat_map_dataset(" in source and "f=self._map_func.function,\n        **self._common_args)" in source
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
    assert parameters(input_lib._replace_per_replica_spec) == ["spec", "i"]
    assert "return value._iterators" in inspect.getsource(spec) and "components=components" in inspect.getsource(spec)
    assert parameters(input_lib._create_distributed_tensor_spec) == ["strategy", "tensor_spec"]
    assert "anonymous resources" in context.anonymous_name.__doc__


def test_functions_are_traced_once(cpus, monkeypatch, own_memories):
    """Iterators that live side by side, over elements of one kind and of another, give each device its own elements."""
    known: dict = {}
    monkeypatch.setattr(kept_functions, "kept", lambda: known)
    monkeypatch.setattr(device_iterators, "kept", lambda: known)
    strategy = tfdist.ShardedStrategy(cpus[:3])

    def read(iterator):
        return [strategy.experimental_local_results(batch) for batch in iterator]

    def distributed(*values):
        names = tf.data.Dataset.from_tensor_slices(tuple(tf.constant(value) for value in values))
        return strategy.experimental_distribute_dataset(names.batch(6))

    numbers, texts = distributed(range(12)), distributed([f"{i}" for i in range(7)])
    known.clear()
    first = iter(numbers)
    assert len(known) == 3
    second, third, words = iter(numbers), iter(distributed(range(100, 115))), iter(texts)
    assert len(known) == 3 + 1 + 3  # and that which splits the third one's batches
    assert [[part[0].numpy().tolist() for part in batch] for batch in read(first)] == [
        [[0, 1], [2, 3], [4, 5]],
        [[6, 7], [8, 9], [10, 11]],
    ]
    assert [part[0].numpy().tolist() for part in read(third)[2]] == [[112], [113], [114]]
    assert len(read(second)) == 2
    assert [part[0].numpy().tolist() for part in read(words)[1]] == [[b"6"], [], []]


def test_functions_go_with_the_context_that_knows_them(cpus, monkeypatch, own_memories):
    """Of another context, as Keras's own distribution tests make it, they are traced again: see tests/keras_suite."""
    iter(tfdist.ShardedStrategy(cpus[:2]).experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4)))
    before = kept_functions.kept()
    assert before and kept_functions.kept() is before
    of_generators = [kept[0]["next_func"] for kept in before.values() if isinstance(kept, tuple)]
    of_splits = [kept.function for kept in before.values() if not isinstance(kept, tuple)]
    assert of_generators and of_splits
    assert all(made._inference_function._bound_context is context.context() for made in of_generators + of_splits)
    monkeypatch.setattr(context, "_context", context.Context())
    assert kept_functions.kept() == {}


def test_batches_of_one_kind_are_split_by_one_function(monkeypatch):
    """Of one structure, whatever its types are; and no dataset is kept with the function."""
    known: dict = {}
    monkeypatch.setattr(kept_functions, "kept", lambda: known)
    Pair = collections.namedtuple("Pair", ["a", "b"])

    def split(value, num_parts=2):
        return split_batches(tf.data.Dataset.range(6).batch(6).map(lambda x: value(x)), num_parts, range(num_parts))

    for value in (lambda x: (x, x + 1), lambda x: Pair(x, -x), lambda x: (x, 2 * x)):
        pieces = list(split(value))
        assert [tuple(part.numpy().tolist() for part in piece) for piece in pieces] == [
            tuple(part.numpy().tolist()[start : start + 3] for part in value(tf.range(6, dtype=tf.int64))) for start in (0, 3)
        ]
        assert type(pieces[0]) is type(value(0)) and type(split(value).element_spec) is type(value(0))
    assert len(known) == 1
    for other in (split(lambda x: (x, tf.cast(x, tf.int32))), split(lambda x: {"a": x, "b": x}), split(lambda x: (x, x), 3)):
        list(other)
    assert len(known) == 4
    dataset = tf.data.Dataset.from_tensors(tf.zeros((4, 7)))
    gone = weakref.ref(dataset)
    list(split_batches(dataset, 2, (0, 1)))
    assert len(known) == 5
    del dataset
    gc.collect()
    assert gone() is None
