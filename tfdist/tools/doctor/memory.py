"""The memory of each ZeRO stage on a device, against its closed formula.

    bytes of parameters, gradients and Adam's state = parameters x bytes per parameter of the stage, plus padding to N equal parts

On every device: what `memory_report` counts, and the variables that exist. On GPUs also the most that TensorFlow's allocator had
given out at once in a few steps, of which the formula is the largest part (`most_bytes`).
"""

import functools
import gc
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdist.mesh.device_details import allocated_bytes, peak_bytes, reset_peak_bytes
from tfdist.profiling import memory_report
from tfdist.sharding import ZERO_STAGES, placements_of
from tfdist.tools.doctor.check import Check, Finding
from tfdist.tools.doctor.session import Session

_WIDTH, _LAYERS = 256, 4
_GPU_WIDTH, _GPU_LAYERS = 2048, 8
_STEPS = 3
_ITEM_BYTES = 4
# Adam's count of steps (int64) and learning rate (float32), whole on every device.
_COUNTER_BYTES = 12
# What libraries take for themselves, cuBLAS 32 MiB of it on recent GPUs, and what an allocator loses by rounding.
_WORKSPACE_BYTES = 96 * 2**20


def memory_checks() -> list[Check]:
    """Returns a check for each ZeRO stage."""
    return [Check(f"memory/zero_stage_{stage}", functools.partial(_measure, stage)) for stage in ZERO_STAGES]


def _measure(zero_stage: int, session: Session) -> Finding:
    strategy = session.strategy(zero_stage=zero_stage)
    gpus = session.local_devices if session.has_gpus and not session.is_quick else ()
    width, layers = (_GPU_WIDTH, _GPU_LAYERS) if gpus else (_WIDTH, _LAYERS)
    keras.backend.clear_session()
    gc.collect()
    before = {gpu: allocated_bytes(gpu) for gpu in gpus}
    for gpu in gpus:
        reset_peak_bytes(gpu)
    with strategy.scope():
        model = keras.Sequential([keras.Input((width,)), *(keras.layers.Dense(width, "relu") for _ in range(layers))])
        model.compile(keras.optimizers.Adam(1e-4), "mse")
        model.optimizer.build(model.trainable_variables)
    if gpus:
        x = np.ones((_STEPS * session.world_size, width), "float32")
        model.fit(x, x, batch_size=session.world_size, verbose=0)
    report = memory_report(model)
    sizes = [math.prod(variable.shape) for variable in model.trainable_variables]
    formula = placements_of(zero_stage).bytes_per_parameter(session.world_size) * sum(sizes)
    padding = 4 * _ITEM_BYTES * session.world_size * len(sizes)  # less than N elements of each variable and kind
    states = [memory.total_bytes - _COUNTER_BYTES for memory in report.devices]
    local = session.base.extended.communicator.local_ranks[0]
    here = [strategy.experimental_local_results(v.value)[0] for v in (*model.variables, *model.optimizer.variables)]
    there = sum(math.prod(part.shape) * part.dtype.size for part in here)  # on this worker's first device
    counted = report.devices[local].total_bytes - report.devices[local].gradient_bytes
    holds = all(formula <= state < formula + padding for state in states) and there == counted
    data: dict[str, Any] = {
        "parameters": sum(sizes),
        "formula_bytes": formula,
        "state_bytes": states,
        "variable_bytes": there,
        "mirrored_bytes": report.mirrored.total_bytes - _COUNTER_BYTES,
    }
    summary = f"states {max(states):,} bytes a device; the formula says {formula:,.0f}, and up to {padding:,} of padding"
    if there != counted:
        summary += f"; but of the {counted:,} bytes of variables {there:,} are there"
    if gpus:
        peak = max(peak_bytes(gpu) - before[gpu] for gpu in gpus)
        at_most = most_bytes(sizes, strategy.sharding_config, session.world_size)
        data |= {"peak_bytes": peak, "peak_at_most_bytes": round(at_most)}
        summary += f"; the allocator's peak {peak:,}, {peak / formula:.2f} of the formula (at most {at_most:,.0f})"
        holds = holds and peak <= at_most
    return Finding(summary, data, holds)


def most_bytes(sizes: Sequence[int], config: Any, ranks: int) -> float:
    """Returns what an allocator's peak may be, of a model with next to no activations and Adam.

    That is the stage's formula, the temporary tensors of the update, buckets on their way, gathered layers, and libraries.
    TensorFlow's executor goes over the updates of all parameters breadth first, so that their temporary tensors exist at once:
    by an NVIDIA H200's allocator together about as much as what the rank updates.

    Args:
        sizes: elements of each variable.
        config: a strategy's `sharding_config`.
        ranks: over which the data axis shards.
    """
    placements = placements_of(config.zero_stage)
    updated = placements.fraction("optimizer_state", ranks) * _ITEM_BYTES
    in_flight = 2 * config.bucket_bytes + (config.prefetch + 2) * _ITEM_BYTES * max(sizes)
    return (placements.bytes_per_parameter(ranks) + updated) * sum(sizes) + in_flight + _WORKSPACE_BYTES
