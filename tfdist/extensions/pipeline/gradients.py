"""Gradients added up over microbatches."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, assign_buckets
from tfdist.optimizers.given import summand_of_sum
from tfdist.optimizers.step import reduce_gradients
from tfdist.optimizers.target import Target
from tfdist.sharding import MeshConfig, ShardedVariable
from tfdist.sharding.gradient_stubs import GradientStubs


class GradientSum:
    """A running sum of gradients for each variable.

    The gradient of an embedding stays rows of its table, those of all microbatches one after the other, while they are fewer than
    the table's own rows.

    Args:
        program: the rank's, where of a parameter that is sharded over the data axis this rank keeps its shard of the sum. The
            gradients of each `add` are then summed over the data ranks at once: no gradient is whole for longer than the action
            that makes it, for as many times the bytes as there are microbatches.
        config: the settings by which they are summed.
    """

    def __init__(self, program: RankProgram | None = None, config: MeshConfig | None = None):
        self._program, self._config = program, config
        self._sums: dict[int, Any] = {}

    def add(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[tf.Tensor]:
        """Adds one gradient for each of `variables`, None for none; returns tensors that exist when the sums do."""
        made = []
        gradients = gradients if self._program is None else self._scattered(variables, gradients)
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is None:
                continue
            total = added(self._sums.get(id(variable)), gradient)
            self._sums[id(variable)] = total
            made.append(total.values if isinstance(total, tf.IndexedSlices) else total)
        return made

    def _scattered(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        parts = list(gradients)
        given = zip(variables, gradients, strict=True)
        # Of the last layers first, as backward makes them.
        places = [place for place, (v, grad) in enumerate(given) if grad is not None and _is_data_sharded(v)][::-1]
        dtypes = [gradients[place].dtype for place in places]
        sizes = [variables[place]._value.layout.local_elements * gradients[place].dtype.size for place in places]
        sent: list[tf.Tensor] = []
        for indices in assign_buckets(sizes, self._config.bucket_bytes, dtypes):
            bucket = [places[index] for index in indices]
            members = [variables[place] for place in bucket]
            with tf.control_dependencies(sent):  # packed when the one before has left: else all would be there a second time
                sent = reduce_gradients([gradients[place] for place in bucket], members, self._config, self._program)
            for place, shard in zip(bucket, sent, strict=True):
                parts[place] = shard
        return parts

    def of(self, variable: Any) -> Any:
        """Returns the sum for `variable`, None if the variable had no gradient."""
        return self._sums.get(id(variable))

    def shape_of(self, variable: Any) -> tf.TensorShape:
        """Returns the shape of the sum for `variable`, without a read of its value, which may have to be gathered."""
        value = variable._value
        is_shard = self._program is not None and _is_data_sharded(variable)
        return tf.TensorShape(value.layout.component_shape) if is_shard else value.shape

    def handed_out(self, variable: Any, total: Any) -> Any:
        """Returns what an optimizer is given for `variable`, of which `total` is the sum, over all stages that use it: of a sum
        of which this rank keeps its shard a tensor of the parameter's shape, by which it is found."""
        if total is None or not _is_data_sharded(variable):
            return total
        if self._program is None:
            return tf.ensure_shape(tf.convert_to_tensor(total), variable._value.shape)  # also of rows of a table
        target, stubs = Target.of(variable, self._config, self._program), self._program.part(GradientStubs)
        stub = stubs.make(target.variable, summand_of_sum(total, target))
        stubs.note_reduced(stub, total)
        return stub.tensor


def _is_data_sharded(variable: Any) -> bool:
    value = variable._value
    return isinstance(value, ShardedVariable) and value.layout.is_data_sharded


def added(one: Any, other: Any) -> Any:
    """Returns the sum of two gradients of one variable, each a tensor, rows of a table, or None."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        table, mine, others = one.shape[0], one.values.shape[0], other.values.shape[0]
        if None in (table, mine, others) or mine + others < table:  # fewer rows than the table has, as far as that is known
            return tf.IndexedSlices(
                tf.concat([one.values, other.values], 0), tf.concat([one.indices, other.indices], 0), one.dense_shape
            )
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)
