"""What callbacks see after a batch: metrics of all ranks' examples.

Each rank's metric counts its own examples, in variables that are summed when they are read outside replicas. So the logs of an
epoch are those of all examples. Those of a batch Keras computes inside the replicas, from each rank's own counts, and averages the
results: a mean of means, and an accuracy of 0 from a rank without rows. Here the counts are summed first, all in one all-reduce,
and the results are computed of the sums; the variables stay as they are.

The mistake to avoid: a metric that is made outside `strategy.scope()`. Its variables are one for all ranks of a process: right at the
end of an epoch, unfinished in the logs of a batch. With several workers it raises.

A `train_step` of one's own gets that by ending in `return self.get_metrics_result()` (or in `compute_metrics`, which does).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram, wire
from tfdist.losses.sharing import sharing_program
from tfdist.override import override


@override("get_metrics_result", keras.Model)
def _get_metrics_result(original: Callable[..., Any], self: keras.Model) -> Any:
    program = sharing_program()
    if program is None:
        return original(self)
    counts = [variable for metric in self.metrics for variable in metric.variables if variable.aggregation == "sum"]
    shared = [variable for variable in counts if not isinstance(variable.value, tf.distribute.DistributedValues)]
    if shared and program.communicator.is_multi_worker:
        raise ValueError(
            errors.message(
                "A metric was made outside `strategy.scope()`: each worker would count its own examples only.",
                variable=shared[0].path,
                fix="Make the metric, or give `compile` its name, inside the scope.",
            )
        )
    counts = [variable for variable in counts if not any(variable is other for other in shared)]
    with keras.StatelessScope(state_mapping=_summed(program, counts)):
        return original(self)


def _summed(program: RankProgram, variables: list[keras.Variable]) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Pairs each of `variables` with its sum over the data ranks; one message for floats, one for integers if there are any."""
    summed = []
    for is_floating, wide in ((True, tf.float32), (False, tf.int64)):
        chosen = [v for v in variables if tf.as_dtype(v.dtype).is_floating == is_floating and v.dtype != "bool"]
        if any(v.dtype == "float64" for v in chosen):
            wide = tf.float64
        values = [tf.convert_to_tensor(v.value) for v in chosen]
        if not values:
            continue
        packed = tf.concat([tf.reshape(tf.cast(value, wide), [-1]) for value in values], 0)
        total = wire.all_reduce(program, packed, program.group_ranks("data"), "sum", "metrics")
        parts = tf.split(total, [value.shape.num_elements() for value in values])
        summed += [
            (v, tf.cast(tf.reshape(part, value.shape), value.dtype))
            for v, part, value in zip(chosen, parts, values, strict=True)
        ]
    return summed
