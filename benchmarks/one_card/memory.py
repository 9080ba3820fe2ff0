"""Part b: the peak of the allocator of each logical device, for the ZeRO stages, against the closed formula.

A stack of square Dense layers and Adam: next to no activations. The formula is that of the stage: bytes of parameters, gradients
and the optimizer's state, for each parameter and rank. What is gathered, buckets on their way and libraries come on top.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from benchmarks.devices import allocators_of
from benchmarks.one_card.card import Card
from benchmarks.one_card.rows import Part, Row
from tfdist.sharding import placements_of
from tfdist.tools.doctor.check import Finding
from tfdist.tools.doctor.memory import most_bytes

_RANKS, _WIDTH, _LAYERS = 4, 4096, 8
_QUICK_RANKS, _QUICK_WIDTH = 2, 512
_STEPS = 3
_MIB = 2**20
MIRRORED = "MirroredStrategy"
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 3, prefetch 1": {"zero_stage": 3, "prefetch": 1},
    MIRRORED: {},
    "stage 2": {"zero_stage": 2},
    "stage 1": {"zero_stage": 1},
    "stage 0": {"zero_stage": 0},
    "stage 3, prefetch 0": {"zero_stage": 3, "prefetch": 0},
    "stage 3, prefetch 2": {"zero_stage": 3, "prefetch": 2},
}
_QUICK = ("stage 3, prefetch 1", "stage 0")


def part(card: Card) -> Part:
    """Returns the rows, each in a process: what one leaves behind is no matter of the next."""
    names = _QUICK if card.is_quick else tuple(SETTINGS)
    columns = {"peak_bytes": "peak", "rest_bytes": "rest", "formula_bytes": "formula", "at_most_bytes": "at most"}
    return Part(
        name="memory",
        rows=[Row(name, functools.partial(_measure, name)) for name in names],
        shares_process=False,
        columns={
            **{f"{heading} MiB": functools.partial(_mib, field) for field, heading in columns.items()},
            "peak / formula": lambda x: f"{x['peak_bytes'] / x['formula_bytes']:.2f}" if "peak_bytes" in x else None,
        },
        text="The largest rank, as its allocator counts: the peak of the first steps, what stays between steps, the closed "
        "formula." + ("" if card.is_gpu else " Logical CPUs share an allocator: the mean of the ranks."),
        seconds=85,
        row_seconds=40,
    )


def _mib(field: str, record: dict[str, Any]) -> str | None:
    return f"{record[field] / _MIB:.1f}" if record.get(field) is not None else None


def _measure(name: str, card: Card) -> Finding:
    ranks, width = (_QUICK_RANKS, _QUICK_WIDTH) if card.is_quick else (_RANKS, _WIDTH)
    devices, settings = card.devices(ranks), SETTINGS[name]
    is_mirrored = name == MIRRORED
    strategy = tf.distribute.MirroredStrategy(devices) if is_mirrored else tfdist.ShardedStrategy(devices, **settings)
    allocators = allocators_of(devices)
    before = allocators.current()
    with allocators.peak() as peak:
        with strategy.scope():
            layers = [keras.layers.Dense(width, "relu", use_bias=False) for _ in range(_LAYERS)]
            model = keras.Sequential([keras.Input((width,)), *layers])
            model.compile(keras.optimizers.Adam(1e-4), "mse")
            model.optimizer.build(model.trainable_variables)
        x = np.ones((_STEPS * ranks, width), "float32")
        model.fit(x, x, batch_size=ranks, verbose=0)
    peaks, rests = (_by_rank(found, before, ranks) for found in (peak.by_device, allocators.current()))
    sizes = [width * width] * _LAYERS
    formula = placements_of(settings.get("zero_stage", 0)).bytes_per_parameter(ranks) * sum(sizes)
    at_most = None if is_mirrored else most_bytes(sizes, strategy.sharding_config, ranks)
    data = {
        "ranks": ranks,
        "parameters": sum(sizes),
        "peak_bytes": max(peaks),
        "peak_bytes_by_rank": peaks,
        "rest_bytes": max(rests),
        "formula_bytes": formula,
        "at_most_bytes": at_most,
    }
    summary = f"peak {max(peaks) / _MIB:.1f} MiB, {max(peaks) / formula:.2f} of the formula"
    return Finding(summary, data, holds=at_most is None or max(peaks) <= at_most)


def _by_rank(found: Sequence[int], before: Sequence[int], ranks: int) -> list[float]:
    """Returns the bytes of each rank; the mean where all share an allocator."""
    grown = [now - then for now, then in zip(found, before, strict=True)]
    return [float(one) for one in grown] if len(grown) == ranks else [sum(grown) / ranks]
