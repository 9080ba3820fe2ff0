"""The datasets of tfdist's strategies, and the iterators by which a process's devices get their elements from them.

CPUs take them from one iterator (`InTurn`). Other devices each get a small dataset of their own from TensorFlow, a generator and
a prefetch. Two things are different here:

* A generator has seven functions, which TensorFlow traces for every device of every iterator; Keras makes two iterators an epoch.
  Here the functions are kept, and the next iterator over elements of the same kind calls them with arguments of its own: half of
  the time that an iterator takes, 0.1 s with four CPUs. They live as long as TensorFlow's context, which knows them by name.
* There is nothing in it to tune. TensorFlow 2.21 still starts a tuning thread for each, which sleeps twice as long every time, up
  to a minute; and who deletes the iterator waits, with Python's lock held, until it wakes. So the end of every epoch stood still
  for up to as long again as the epoch had taken. The user's own dataset keeps its tuning.

The base classes are private to TensorFlow: tests/data/test_device_iterators.py fails when they change.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops, prefetch_op
from tensorflow.python.distribute import device_util, input_lib
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_dataset_ops

from tfdist.data.end_of_data import EndOfData
from tfdist.data.iterator import DistributedIterator, InTurn
from tfdist.data.kept_functions import keep, kept
from tfdist.mesh import are_cpus


class _Spec:
    """A mixin of a type spec: what has passed into a `tf.function` is of tfdist's class there, too."""

    def _serialize(self) -> tuple[Any, ...]:
        return (*super()._serialize(), str(self._enable_get_next_as_optional))

    def _from_components(self, components: Any) -> Any:
        dataset = self.value_type.__new__(self.value_type)
        vars(dataset).update(vars(super()._from_components(components)))
        return dataset.end_after(self._cardinality, self._enable_get_next_as_optional or None)


class _DatasetSpec(_Spec, input_lib.DistributedDatasetSpec):
    value_type = property(lambda self: DistributedDataset)


class _FromFunctionSpec(_Spec, input_lib.DistributedDatasetsFromFunctionSpec):
    value_type = property(lambda self: DistributedDatasetsFromFunction)


class _Iterated:
    """A mixin of a distributed dataset, which makes iterators of tfdist's. `_held_as` names the attribute with its datasets."""

    _held_as: str
    _spec: type

    @property
    def _type_spec(self) -> Any:
        known = self._input_workers, self._element_spec, self._strategy, self._options
        return self._spec(*known, self._cardinality, self._enable_get_next_as_optional)

    def end_after(self, steps: int, ends: EndOfData | None) -> Self:
        """Lets iterators end after so many steps, which may be unknown, as `ends` tells; None: on all workers together."""
        self._cardinality = np.int64(steps)
        self._enable_get_next_as_optional = ends or False
        return self

    def map(self, function: Callable[..., Any]) -> Self:
        """Returns the dataset of what `function` makes of each device's batches, row by row: Keras's `class_weight` does so."""
        mapped = copy.copy(self)
        datasets = [dataset.map(function) for dataset in getattr(self, self._held_as)]
        setattr(mapped, self._held_as, datasets)
        mapped._element_spec = input_lib._create_distributed_tensor_spec(self._strategy, datasets[0].element_spec)
        return mapped

    def prefetch(self, buffer_size: int) -> Self:
        """Returns the dataset itself: its iterators prefetch to the devices."""
        del buffer_size
        return self

    def __iter__(self) -> Iterator[Any]:
        workers, options = self._input_workers, self._options
        (dataset,), (worker,) = getattr(self, self._held_as), workers.worker_devices
        devices = workers.compute_devices_for_worker(0)
        with tf.device(worker):
            if are_cpus(devices):
                of_worker: Any = InTurn(iter(dataset), len(devices))
            else:
                of_worker = _WorkerIterator(dataset, worker, devices, options=options, canonicalize_devices=True)
        iterator = DistributedIterator(
            workers,
            [of_worker],
            self._strategy,
            cardinality=self._cardinality,
            enable_get_next_as_optional=self._enable_get_next_as_optional,
            options=options,
        )
        iterator._element_spec = self._element_spec
        iterator.count_batches()
        context.async_wait()
        return iterator


class DistributedDataset(_Iterated, input_lib.DistributedDataset):
    """A dataset of a tfdist strategy; `given` is the one that it was made of, of global batches."""

    given: tf.data.Dataset | None = None

    _held_as, _spec = "_cloned_datasets", _DatasetSpec


class DistributedDatasetsFromFunction(_Iterated, input_lib.DistributedDatasetsFromFunction):
    """A dataset of a tfdist strategy that a function has made."""

    _held_as, _spec = "_datasets", _FromFunctionSpec


class _WorkerIterator(input_lib._SingleWorkerOwnedDatasetIterator):
    """The iterator over the devices of one worker."""

    def _create_owned_multi_device_iterator(self) -> None:
        worker = host = self._worker
        if tf.executing_eagerly():
            worker = device_util.canonicalize(worker, device_util.current())
            host = device_util.get_host_for_device(worker)
        buffer_size = 1 if self._options is None else self._options.experimental_per_replica_buffer_size
        options, untuned = tf.data.Options(), tf.data.Options()
        options.experimental_distribute.num_devices = len(self._devices)
        if buffer_size == 0:
            options.experimental_optimization.inject_prefetch = False  # which would read ahead
        untuned.autotune.enabled = False
        with tf.device(worker):
            dataset = self._dataset.with_options(options)._apply_debug_options()
            source = tf.convert_to_tensor(host)
            with tf.device(host):
                resource = gen_dataset_ops.anonymous_multi_device_iterator_v3(devices=self._devices, **dataset._flat_structure)
                incarnation = gen_dataset_ops.multi_device_iterator_init(
                    dataset._variant_tensor, resource, max_buffer_size=max(1, buffer_size)
                )
            iterators = []
            for index, device in enumerate(self._devices):
                with tf.device(device):
                    elements = _generator(index, resource, incarnation, source, dataset)
                    if buffer_size > 0:
                        slack = 1 if dataset.options().experimental_slack else None
                        elements = prefetch_op._PrefetchDataset(elements, buffer_size, slack_period=slack, name="device_prefetch")
                    iterators.append(iter(elements.with_options(untuned)))
            self._iterator = multi_device_iterator_ops.OwnedMultiDeviceIterator(
                devices=self._devices, source_device=host, components=[resource, *iterators], element_spec=dataset.element_spec
            )


def _generator(
    index: int, resource: tf.Tensor, incarnation: tf.Tensor, source: tf.Tensor, dataset: tf.data.Dataset
) -> tf.data.Dataset:
    """Returns the dataset that yields the elements of device `index`, the current one."""
    arguments = {"source": source, "incarnation": incarnation, "iterator": resource}
    key = (device_util.current(), index, tuple(tf.nest.flatten(dataset.element_spec)))
    if not tf.executing_eagerly() or key not in kept():
        made = multi_device_iterator_ops._PerDeviceGenerator(
            index, resource, incarnation, source, dataset.element_spec, iterator_is_anonymous=True
        )
        if tf.executing_eagerly():
            # The traced functions, and the names of what each is called with: what has none is the iterator's handle.
            kinds, names = ("init", "next", "finalize"), {id(argument): name for name, argument in arguments.items()}
            captured = [getattr(made, f"_{kind}_captured_args") for kind in kinds]
            called_with = [[names.get(id(argument), "handle") for argument in of_function] for of_function in captured]
            keep(key, ({f"{kind}_func": getattr(made, f"_{kind}_func") for kind in kinds}, called_with))
        return made
    functions, called_with = kept()[key]
    arguments["handle"] = gen_dataset_ops.multi_device_iterator_to_string_handle(resource)
    given = [[arguments[name] for name in of_function] for of_function in called_with]
    variant = gen_dataset_ops.generator_dataset(*given, **functions, **dataset._flat_structure)
    return tf.data.experimental.from_variant(variant, dataset.element_spec)
