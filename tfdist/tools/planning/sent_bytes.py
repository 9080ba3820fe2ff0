"""The bytes that a rank sends in a training step under a plan, by axis of the mesh: to the byte what `strategy.last_plan` counts.

With P bytes of the local part of parameters, padded to N equal shards, and ring algorithms:

    data     stage 0       all-reduce of gradients                                    2 P (N - 1)/N
             stages 1, 2   reduce-scatter of gradients, all-gather of parameters      2 P (N - 1)/N
             groups        with G groups of N the all-reduce of shards between them   2 P/N (G - 1)/G
             stage 3       all-gathers for forward and for backward, reduce-scatter   up to 3 P (N - 1)/N: see `gathers`
             all           the rows of the batch, and running statistics
    tensor   what sharded layers sum and gather (`tensor_plans.traffic`)
    pipe     what passes between stages, each way, and the loss
"""

import collections
import dataclasses
from collections.abc import Sequence

from tfdist.extensions.compression import Compressor, compressor_of
from tfdist.extensions.pipeline.stages.costs import bytes_per_example
from tfdist.sharding import ShardingConfig, travels_exactly
from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.gathers import gathers_of
from tfdist.tools.planning.parts import Part, parts_at
from tfdist.tools.planning.traced_model import TracedModel

_FLOAT, _DOUBLE = 4, 8


def sent_of(
    traced: TracedModel, candidate: Candidate, batch_size: int, pipe: int = 0, config: ShardingConfig | None = None
) -> dict[str, float]:
    """Returns the bytes that a rank sends in a step, by axis: "data", "tensor" and "pipe".

    On one machine stages pass tensors by edges of the graph, which `last_plan` does not count; they are counted here. Of
    optimizers that look at whole tensors, and of layers that compute in half precision, the bytes are an estimate.

    Args:
        traced: the model.
        candidate: the plan.
        batch_size: examples of a step, of all replicas together.
        pipe: the rank of the pipeline.
        config: the settings of the strategy that the plan leaves open, `group_bytes` and `prefetch` among them; None: defaults.
    """
    config = config or ShardingConfig()
    rows = -(-batch_size // candidate.data)
    sizes = candidate.tensor, candidate.pipeline, candidate.stages_per_rank
    return {
        "data": _over_data(traced, candidate, pipe, config) if candidate.data > 1 else 0.0,
        "tensor": sum(traced.layouts.moved_bytes(*sizes, pipe)) * rows if candidate.tensor > 1 else 0.0,
        "pipe": _over_pipe(traced, candidate, rows, pipe) if candidate.pipeline > 1 else 0.0,
    }


def _over_data(traced: TracedModel, candidate: Candidate, pipe: int, config: ShardingConfig) -> float:
    size = candidate.shards
    part = (size - 1) / size
    parts = parts_at(traced, candidate, pipe).parts
    trained = reduced = [one for one in parts if one.weight.trainable]
    compressor = compressor_of("gradient_compression", candidate.gradient_compression)
    rounding = compressor_of("parameter_compression", candidate.parameter_compression)
    gradients = compressor if candidate.data == size else None  # of several groups what these send each other is compressed
    gathered = {one.weight.path: _bytes(one, rounding, size) for one in parts if one.weight.is_parameter}
    whole = sum(gathered.values())
    if candidate.zero_stage == 3 and candidate.pipeline == 1:
        gathers = gathers_of(traced, candidate.tensor, candidate.recompute, config.group_bytes, config.prefetch)
        whole = sum(gathered[path] for one in gathers for path in (*one.paths, *one.again))
        reads = collections.Counter(path for one in gathers for path in one.reduced)  # as often its gradient is reduced
        reduced = [one for one in trained for _ in range(max(reads[one.weight.path], 1))]
    padded = sum(_bytes(one, gradients, size) for one in reduced)
    exact = sum(one.stored(True) * size for one in trained)
    if candidate.zero_stage == 3:
        sent = padded * part + whole * part
    elif candidate.zero_stage == 0:
        sent = 2 * (sum(one.bytes for one in trained) if gradients is None else padded) * part
    else:
        sent = (padded + sum(_bytes(one, rounding, size) for one in trained)) * part
    if not traced.is_elementwise and candidate.zero_stage:  # shards are gathered again, and owners send what they have updated
        sent += exact * part * (1 if candidate.zero_stage == 3 else 0) + exact / size
    return sent + _between_groups(reduced, compressor, candidate.data // size) + _small(traced, candidate, parts)


def _between_groups(trained: Sequence[Part], compressor: Compressor | None, groups: int) -> float:
    """Returns the bytes of the all-reduce of a rank's shards over the sharding groups."""
    pieces = [dataclasses.replace(one, shard=-(-one.shard // groups)) for one in trained]
    whole = sum(one.stored(True) for one in trained)
    padded = whole if compressor is None else sum(_bytes(one, compressor, groups) for one in pieces)
    return 2 * padded * (groups - 1) / groups


def _bytes(part: Part, compressor: Compressor | None, size: int) -> int:
    """Returns the bytes of the rows for all ranks in which a weight or its gradient travels."""
    if compressor is None or travels_exactly(part.weight.shape):
        return part.stored(True) * size
    return compressor.bytes_of(part.shard) * size


def _small(traced: TracedModel, candidate: Candidate, parts: Sequence[Part]) -> float:
    """Returns the bytes of sums over the replicas besides gradients: how many rows each has, and running statistics."""
    part = 2 * (candidate.data - 1) / candidate.data
    statistics = [one for one in parts if one.weight.path in traced.statistics]
    sent = part * _FLOAT * (sum(one.local for one in statistics) + len(statistics))
    return sent + part * (_DOUBLE + (_FLOAT if candidate.pipeline > 1 else _DOUBLE))


def _over_pipe(traced: TracedModel, candidate: Candidate, rows: int, pipe: int) -> float:
    """Returns the bytes of activations that a rank hands on, of gradients that it hands back, and of the loss."""
    staged = traced.layouts.staged(candidate.stages)
    sent = 0.0
    for stage in staged.stages[:-1]:
        here, there = stage.index % candidate.pipeline, (stage.index + 1) % candidate.pipeline
        if here != there:
            sent += bytes_per_example(stage.stage_outputs) * rows * ((here == pipe) + (there == pipe))
    return sent + _FLOAT * 2 * (candidate.pipeline - 1) / candidate.pipeline
