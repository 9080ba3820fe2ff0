"""Weights that were put together for an eager call outside replicas, kept until they change.

    model(x)            each sharded weight that a layer reads is assembled on the first device, and kept
    model(x)            nothing is assembled
    model.fit(...)      dropped when the step is called: training has the memory that it has without this
    model(x)            assembled again: the weights have changed

Note: how a write is noticed. Shards are variables of a class of their own, which tells of every assignment, and an optimizer's
step tells of itself (it may write by handles, in functions that ranks share). What runs eagerly drops the value at once. What is
traced has it dropped around each call of its function: see `calls`.

Note: threads. A value that one thread puts together while another is in a call that may write is not kept.

Note: several workers. To assemble is a collective there, which all must join, so whether a value is kept must not depend on
anything in which workers may differ, such as when Python frees a model. There weights are kept in `strategy.gathered` only.
"""

import collections
import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.graphs.calls import around_calls
from tfdist.sharding import keras_scope
from tfdist.sharding.assembly import is_elsewhere
from tfdist.sharding.watched_writes import watch_writes


class WeightCache:
    """The assembled weights of one strategy, whose `extended` has them as `weight_cache`. It keeps no variable alive.

    Args:
        limit_bytes: how much may be kept in all, of what is not in `gathered`.
    """

    def __init__(self, limit_bytes: int):
        self._limit_bytes = limit_bytes
        self._values: dict[int, tuple[tf.Tensor, int]] = {}  # and their bytes, by the variable's number
        self._gathered: collections.Counter[int] = collections.Counter()  # how many blocks of `gathered` a variable is in
        self._lock = threading.RLock()
        self._writers = 0  # how many blocks that may write are entered
        self._writes = 0  # and how many have ended
        self.kept_bytes = 0

    def read(self, variable: Any, assemble: Callable[[Any], tf.Tensor]) -> tf.Tensor:
        """Returns the full value of `variable`, a `ShardedVariable`: the kept one, or what `assemble(variable)` returns."""
        if not (variable.is_parameter and tf.executing_eagerly()):
            return assemble(variable)
        if (kept := self._values.get(variable.number)) is not None:
            return kept[0]
        before = self._writes
        value, size = assemble(variable), math.prod(variable.layout.shape) * variable.dtype.size
        with self._lock:
            if before == self._writes and not self._writers and self._may_keep(variable, size):
                self.forget(variable.number)
                self._values[variable.number] = value, size
                self.kept_bytes += size
        return value

    def _may_keep(self, variable: Any, size: int) -> bool:
        if self._gathered[variable.number]:
            return True
        is_called = keras_scope.current_layer() is not None  # else it is saved, or looked at, once
        return is_called and not is_elsewhere(variable) and self.kept_bytes + size <= self._limit_bytes

    def forget(self, *numbers: int) -> None:
        """Drops the values of the variables of these numbers."""
        with self._lock:
            for number in numbers:
                _, size = self._values.pop(number, (None, 0))
                self.kept_bytes -= size

    @contextlib.contextmanager
    def gathered(self, variables: Sequence[Any]) -> Iterator[None]:
        """Keeps `variables` whatever their size, from now until the block ends, and drops those that were not kept before."""
        numbers = [variable.number for variable in variables]
        new = [number for number in numbers if number not in self._values]
        self._gathered.update(numbers)
        try:
            for variable in variables:
                variable.read_value()
            yield
        finally:
            self._gathered.subtract(numbers)
            self.forget(*(number for number in new if not self._gathered[number]))

    @contextlib.contextmanager
    def written(self, *numbers: int) -> Iterator[None]:
        """A block that may write: meanwhile nothing is kept. It drops the values of the variables of these numbers."""
        with self._lock:
            self._writers += 1
            self.forget(*numbers)
        try:
            yield
        finally:
            with self._lock:
                self._writers -= 1
                self._writes += 1

    def all_written(self) -> contextlib.AbstractContextManager[None]:
        """As `written`, of all variables."""
        return self.written(*self._values)

    def forget_all(self, *, at_calls: bool) -> None:
        """Drops all values, now or around each call of what is traced here: it writes some."""
        around_calls(self.all_written, key=self) if at_calls else self.forget(*self._values)


def sharded_parameters(what: Iterable[Any]) -> list[Any]:
    """Returns the sharded variables of models, layers and the like, and among variables, that read whole inside replicas."""
    found = {}
    for one in what:
        if not hasattr(one, "variables") and not isinstance(one, keras.Variable | tf.Variable):
            raise errors.value_error("`what` must be models, layers or variables.", what=one)
        for variable in getattr(one, "variables", [one]):
            stored = variable._value if isinstance(variable, keras.Variable) else variable
            if getattr(stored, "is_parameter", False):
                found[stored.number] = stored
    return list(found.values())


def watch(variable: Any) -> None:
    """Makes `variable`, a `ShardedVariable`, tell its strategy's `WeightCache` of every assignment to a shard, and of its end."""
    for shard in variable.values:
        watch_writes(shard, _drop_first)
    weakref.finalize(variable, variable.distribute_strategy.extended.weight_cache.forget, variable.number).atexit = False


def _drop_first(shard: tf.Variable, write: Callable[[], Any]) -> Any:
    whole = shard.handle._distributed_container()
    if whole is None:
        return write()
    written = functools.partial(whole.distribute_strategy.extended.weight_cache.written, whole.number)
    around_calls(written, key=(WeightCache, whole.number))
    with written() if tf.executing_eagerly() else contextlib.nullcontext():
        return write()
