"""The iterator over a job's steps: the next batch of every device of this process, as long as any worker has one.

TensorFlow's asks at every step which devices have a batch, where shapes may vary, and gives the others one without rows. Here
it is known from the dataset whether that can be (`ends`):

    False       the devices of all workers reach the end together: nobody asks
    an `EndOfData`   workers may reach it one before the other: each step begins with a message

The attribute is TensorFlow's, which hands it on wherever it makes one iterator, or its spec, of another, and asks only whether it
is true. The base classes are private to TensorFlow: tests/data/test_device_iterators.py fails when they change.
"""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import device_util, input_lib
from tensorflow.python.eager import context
from tensorflow.python.ops import cond

from tfdist import errors
from tfdist.collectives import cross_replica_of
from tfdist.data.end_of_data import EndOfData
from tfdist.data.parts import num_unknown_sizes, unknown_sizes, without_rows
from tfdist.mesh import are_cpus

_cond = functools.partial(cond.cond, strict=True)


class _IteratorSpec(input_lib.DistributedIteratorSpec):
    """Specs with different ends are of different steps, with and without a message."""

    value_type = property(lambda self: DistributedIterator)

    def _serialize(self) -> tuple[Any, ...]:
        return (*super()._serialize(), str(self._enable_get_next_as_optional))

    def sanity_check_type(self, other: Any) -> None:
        super().sanity_check_type(other)
        if self._enable_get_next_as_optional != other._enable_get_next_as_optional:
            raise ValueError("The ends of the data are told in different ways")

    @property
    def _component_specs(self) -> list[Any]:
        counter = [tf.TensorSpec([], tf.resource)] if self._enable_get_next_as_optional else []
        if not are_cpus(self._devices):
            return [*super()._component_specs, *counter]
        # Once, so that a function that takes several elements keeps their order.
        of_one = tf.nest.map_structure(lambda spec: input_lib._replace_per_replica_spec(spec, 0), self._element_spec)
        return [tf.data.IteratorSpec(of_one), *counter]

    @property
    def _devices(self) -> Sequence[str]:
        return self._input_workers.compute_devices_for_worker(0)

    def _to_components(self, value: Any) -> list[Any]:
        iterators = [getattr(iterator, "elements", iterator) for iterator in super()._to_components(value)]
        return [*iterators, *([value.batches] if self._enable_get_next_as_optional else [])]

    def _from_components(self, components: Sequence[Any]) -> "DistributedIterator":
        iterators, counter = components, None
        if self._enable_get_next_as_optional:
            *iterators, counter = components
        if are_cpus(self._devices):
            iterators = [InTurn(elements, len(self._devices)) for elements in iterators]
        made = DistributedIterator.__new__(DistributedIterator)
        made.__dict__.update(vars(super()._from_components(iterators)))
        made.batches = counter
        return made


class DistributedIterator(input_lib.DistributedIterator):
    """The iterator over a dataset of a tfdist strategy.

    Attributes:
        batches: how many batches each worker has had, the handle of a variable; None where nobody asks.
    """

    batches: tf.Tensor | None = None

    @property
    def _ends(self) -> EndOfData | None:
        return self._enable_get_next_as_optional or None

    @property
    def _type_spec(self) -> _IteratorSpec:
        known = self._input_workers, self._element_spec, self._strategy, self._options
        return _IteratorSpec(*known, self._cardinality, self._enable_get_next_as_optional, self._replica_order)

    def count_batches(self) -> None:
        """Begins to count the batches of each worker, where that is asked."""
        if self._ends is not None:
            with tf.device(self._host):
                zeros = tf.zeros([len(self._ends.tasks)], tf.int64)
                name = context.anonymous_name()
                self.batches = tf.raw_ops.VarHandleOp(dtype=zeros.dtype, shape=zeros.shape, shared_name=name)
                tf.raw_ops.AssignVariableOp(resource=self.batches, value=zeros)

    def get_next(self, name: str | None = None) -> Any:
        """Returns the next batch of every device; raises `tf.errors.OutOfRangeError` when no worker has one."""
        if self._ends is None:
            return super().get_next(name)
        if tf.distribute.get_strategy() is self._strategy and tf.distribute.in_cross_replica_context() is False:
            raise errors.value_error(
                "The next batch is that of all ranks, and cannot be asked for inside `strategy.run`.",
                fix="Give it to the function: `strategy.run(step, args=(next(iterator),))`.",
            )
        optionals = self._optionals()
        end = self._get_next_no_partial_batch_handling
        has_next, sizes = self._any_has_next(optionals)
        return _cond(has_next, lambda: self._values(optionals, sizes), end)

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """Returns the next batch of every device, or none when no worker has one."""
        optionals = self._optionals()
        has_next, sizes = (optionals[0].has_value(), []) if self._ends is None else self._any_has_next(optionals)
        optional = tf.experimental.Optional
        return _cond(
            has_next,
            lambda: optional.from_value(self._values(optionals, sizes)),
            lambda: optional.empty(self.element_spec),
        )

    def _optionals(self) -> list[tf.experimental.Optional]:
        """Returns the next batch of each local device, if it has one."""
        (iterator,), (worker,) = self._iterators, self._input_workers.worker_devices
        with tf.device(worker):
            return iterator.get_next_as_optional_list()

    def _any_has_next(self, optionals: list[tf.experimental.Optional]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns whether any worker has another batch, and what `unknown_sizes` the first worker's has that has one.

        All workers call it, and all raise if workers that end together do not.
        """
        ends = self._ends
        has_next = tf.reduce_any([optional.has_value() for optional in optionals])
        told = tf.one_hot(ends.here, len(ends.tasks), dtype=tf.int64)[:, tf.newaxis] * tf.cast(has_next, tf.int64)
        number = num_unknown_sizes(optionals[0].element_spec)
        if number:
            told *= tf.concat([[tf.constant(1, tf.int64)], self._sizes(optionals[0], number)], axis=0)
        if len(ends.tasks) > 1:
            told = cross_replica_of(self._strategy).sum_over_workers(told, "data/have next")
        have_next = told[:, 0]
        sizes = tf.unstack(told[tf.argmax(have_next), 1:], number) if number else []
        with tf.device(self._host):
            tf.raw_ops.AssignAddVariableOp(resource=self.batches, value=have_next)
            batches = tf.raw_ops.ReadVariableOp(resource=self.batches, dtype=tf.int64)
            with tf.control_dependencies(ends.checks(have_next, batches)):
                return tf.reduce_any(have_next > 0), sizes

    def _sizes(self, optional: tf.experimental.Optional, number: int) -> tf.Tensor:
        """Returns the `unknown_sizes` of a batch, zeros if there is none; the first device has one if any has."""
        spec = optional.element_spec
        return _cond(
            optional.has_value(),
            lambda: tf.ensure_shape(unknown_sizes(optional.get_value(), spec), [number]),
            lambda: tf.zeros([number], tf.int64),
        )

    @property
    def _host(self) -> str:
        return device_util.get_host_for_device(self._input_workers.worker_devices[0])

    def _values(self, optionals: list[tf.experimental.Optional], sizes: list[tf.Tensor]) -> Any:
        found = []
        for optional, device in zip(optionals, self._input_workers.compute_devices_for_worker(0), strict=True):
            with tf.device(device):
                if self._ends is None:
                    found.append(optional.get_value())
                else:
                    empty = functools.partial(without_rows, optional.element_spec, sizes)
                    found.append(_cond(optional.has_value(), optional.get_value, empty))
        return input_lib._create_per_replica(found, self._strategy)


class InTurn:
    """One iterator, `elements`, for all devices of a worker, which take its elements in turn, where they share a memory.

        TensorFlow, for each device    dataset -> buffer -> function on the host -> function on the device -> prefetch -> iterator
        here, for all                  dataset -> iterator

    What TensorFlow does brings elements to devices with memories of their own before they are wanted. A CPU finds an element
    where the dataset has put it, so that nothing is gained; and every iterator begins by making those functions ready to run,
    which with two CPUs was 60 % of the time that it took. Keras makes two iterators at each `evaluate`, and an epoch of `fit`.
    """

    def __init__(self, elements: Any, num_devices: int):
        self.elements, self._num_devices = elements, num_devices

    def get_next_as_list(self, name: str | None = None) -> list[Any]:
        return [self.elements.get_next() for _ in range(self._num_devices)]

    def get_next_as_optional_list(self) -> list[tf.experimental.Optional]:
        return [self.elements.get_next_as_optional() for _ in range(self._num_devices)]
