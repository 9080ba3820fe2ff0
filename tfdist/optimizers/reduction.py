"""From the gradients that left a rank's tape to the summed ones that its optimizer steps with.

What happens to a gradient follows from the placements of its variable:

    parameter sharded (stage 3)      the tape has reduced it: a flat shard             nothing moves
    state sharded (stages 1, 2)      reduce-scatter in buckets: a flat shard
    nothing sharded (stage 0)        all-reduce in buckets: the whole gradient
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import tensorflow as tf

from tfdist.collectives import RankProgram, assign_buckets, wire
from tfdist.optimizers.variables import is_data_sharded, layout_of
from tfdist.optimizers.whole_gradients import reduced_shard
from tfdist.sharding import MeshConfig, Shard, UnshardSchedule, packing
from tfdist.sharding.gradients_in_flight import GradientsInFlight


@dataclasses.dataclass(eq=False)
class ReducedGradient:
    """A gradient summed over the data axis, as far as this rank holds it.

    It may be passed to `Optimizer.apply` in the place of a gradient; it is not reduced again.

    Attributes:
        variable: the distributed variable.
        dtype: of the value.
        make: makes the value, when it is first asked for: a flat shard (L,), padded with zeros, or the whole gradient.
        note_gather: to be called with what is gathered, while values have not been asked for yet.
    """

    variable: tf.Variable
    dtype: tf.DType
    make: Callable[[], tf.Tensor]
    note_gather: Callable[[tf.Tensor], None] = lambda gathered: None
    _value: tf.Tensor | None = dataclasses.field(default=None, init=False)

    @classmethod
    def of(cls, variable: tf.Variable, value: tf.Tensor) -> Self:
        return cls(variable, value.dtype, lambda: value)

    @property
    def value(self) -> tf.Tensor:
        # No `functools.cached_property`: it lets one thread at a time make a value, of any gradient, and eager ranks make theirs
        # together.
        if self._value is None:
            self._value = self.make()
        return self._value

    def then(self, function: Callable[[tf.Tensor], tf.Tensor]) -> ReducedGradient:
        """Returns it with `function` of its value, of the same shape and dtype."""
        return dataclasses.replace(self, make=lambda: function(self.value))


class _Known:
    """What is reduced in this trace, by the gradient it is made from."""

    def __init__(self, program: RankProgram):
        del program
        self._reduced: dict[int, tuple[tf.Tensor, ReducedGradient]] = {}

    def find(self, grads: Sequence[Any]) -> list[ReducedGradient] | None:
        """Returns the reduced counterparts of `grads`, None unless all are known."""
        found = [self._reduced.get(id(grad)) for grad in grads]
        return [reduced for _, reduced in found] if found and all(found) else None

    def add(self, grads: Sequence[Any], reduced: Sequence[ReducedGradient]) -> None:
        # The gradient is kept, so that its id stays its own.
        self._reduced.update({id(grad): (grad, result) for grad, result in zip(grads, reduced, strict=True)})


def reduce_gradients(
    grads: Sequence[Any], variables: Sequence[tf.Variable], config: MeshConfig, program: RankProgram
) -> list[ReducedGradient]:
    """Sums `grads` over the data axis; each comes back as what this rank keeps of it.

    Args:
        grads: this rank's gradients as they left the tape; IndexedSlices are summed and made dense. What has been reduced in
            this trace already, and `ReducedGradient`s, are not reduced again.
        variables: the distributed variables.
        config: the strategy's sharding.
        program: the rank's program.
    """
    reduced = reduced_when_asked(grads, variables, config, program)
    for gradient in reversed(reduced):
        _ = gradient.value
    return reduced


def reduced_when_asked(
    grads: Sequence[Any], variables: Sequence[tf.Variable], config: MeshConfig, program: RankProgram
) -> list[ReducedGradient]:
    """As `reduce_gradients`; but a bucket of gradients is reduced when the value of one, or of a later bucket's, is asked for.

    So parameters that have been updated can be gathered between the reductions, while others wait for their gradients.
    """
    if all(isinstance(grad, ReducedGradient) for grad in grads):
        return list(grads)
    schedule = program.attachment(UnshardSchedule)
    schedule.flush(grads)
    known = program.attachment(_Known)
    reduced = known.find(grads)
    if reduced is None:
        with tf.device(program.device):
            dense = [_dense(grad, variable, config) for grad, variable in zip(grads, variables, strict=True)]
            reduced = _reduced(dense, variables, config, program)
        known.add(grads, reduced)
    return reduced


def _dense(grad: Any, variable: tf.Variable, config: MeshConfig) -> tf.Tensor:
    """Returns a gradient as a tensor of static shape: that of rows of a batch of unknown size is forgotten on the way."""
    grad = tf.convert_to_tensor(grad)
    if not is_data_sharded(variable) and not grad.shape.is_fully_defined():
        grad = tf.ensure_shape(grad, layout_of(variable, config).local_shape)
    return grad


def _reduced(
    grads: Sequence[tf.Tensor], variables: Sequence[tf.Variable], config: MeshConfig, program: RankProgram
) -> list[ReducedGradient]:
    reduced: dict[int, ReducedGradient] = {}
    full = []
    for place, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
        if is_data_sharded(variable):
            reduced[place] = ReducedGradient.of(variable, reduced_shard(grad, variable, config, program))
        else:
            full.append(place)
    # Backward makes the last layers' gradients first: their buckets go first.
    full.reverse()
    buckets = _Buckets([grads[place] for place in full], [variables[place] for place in full], config, program)
    reduced.update(zip(full, buckets.gradients(), strict=True))
    return [reduced[place] for place in range(len(grads))]


class _Buckets:
    """Full gradients that are reduced in buckets, one after the other."""

    def __init__(self, grads: Sequence[tf.Tensor], variables: Sequence[tf.Variable], config: MeshConfig, program: RankProgram):
        self._grads = grads
        self._variables = variables
        self._config = config
        self._program = program
        self._buckets = buckets_of(grads, config.bucket_bytes)
        self._parts: list[list[tf.Tensor]] = []  # of the buckets that have been reduced
        self._flight = self._gradients_in_flight()

    def gradients(self) -> list[ReducedGradient]:
        """Returns them in the order in which they were given."""
        where = {place: (n, i) for n, bucket in enumerate(self._buckets) for i, place in enumerate(bucket)}
        return [
            ReducedGradient(variable, grad.dtype, functools.partial(self._part, *where[place]), self._note_gather)
            for place, (variable, grad) in enumerate(zip(self._variables, self._grads, strict=True))
        ]

    def _part(self, number: int, index: int) -> tf.Tensor:
        with tf.device(self._program.device):
            while len(self._parts) <= number:
                self._parts.append(self._reduce(len(self._parts)))
                if self._flight is not None:
                    self._flight.note_reduction(self._parts[-1][0])
        return self._parts[number][index]

    def _note_gather(self, gathered: tf.Tensor) -> None:
        if self._flight is not None:
            self._flight.note_gather(gathered)

    def _reduce(self, number: int) -> list[tf.Tensor]:
        bucket, config = self._buckets[number], self._config
        members = [self._grads[place] for place in bucket]
        if not isinstance(config.placements.optimizer_state, Shard):
            return _all_reduce(members, f"all_reduce/bucket_{number}", config, self._program)
        layouts = [config.slot_layout(layout_of(self._variables[place], config)) for place in bucket]
        return _reduce_scatter(members, layouts, f"reduce_scatter/bucket_{number}", config, self._program)

    def _gradients_in_flight(self) -> GradientsInFlight | None:
        """For stage 2, where they were made in the graph in which they are reduced."""
        program, ranks = self._program, self._program.group_ranks("data")
        if not self._grads or not isinstance(self._config.placements.gradient, Shard) or len(ranks) == 1:
            return None
        if program.is_eager or tf.compat.v1.get_default_graph() is not program.graph:
            return None
        numbers = {op.name: number for number, op in enumerate(program.graph.get_operations())}
        messages = [[self._grads[place] for place in bucket] for bucket in self._buckets]
        return GradientsInFlight(messages, numbers, program, ranks)


def buckets_of(tensors: Sequence[tf.Tensor], bucket_bytes: int) -> list[list[int]]:
    """Returns the places in `tensors`, in order, cut in buckets of one dtype and about `bucket_bytes`."""
    sizes = [tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors]
    return assign_buckets(sizes, bucket_bytes, [tensor.dtype for tensor in tensors])


def _all_reduce(grads: Sequence[tf.Tensor], label: str, config: MeshConfig, program: RankProgram) -> list[tf.Tensor]:
    flat = packing.side_by_side(grads, program.constant)
    # Summed on the way: a gradient of half precision as float32, unless the user wants otherwise.
    is_half = flat.dtype in (tf.float16, tf.bfloat16)
    wide = tf.cast(flat, config.travel_dtype(tf.float32 if is_half else flat.dtype))
    reduced = tf.cast(wire.all_reduce(program, wide, program.group_ranks("data"), "sum", label), flat.dtype)
    return packing.apart(reduced, [grad.shape for grad in grads], program.constant)


def _reduce_scatter(
    grads: Sequence[tf.Tensor], layouts: Sequence[Any], label: str, config: MeshConfig, program: RankProgram
) -> list[tf.Tensor]:
    """Returns this rank's shards of the sums."""
    dtype = grads[0].dtype
    rows = [tf.cast(row, config.travel_dtype(dtype)) for row in packing.rows_of(grads, layouts, program.constant)]
    return wire.reduce_scatter_parts(program, rows, program.group_ranks("data"), label, dtype=dtype)
