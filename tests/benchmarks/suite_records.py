"""Records as `benchmarks.run` makes them, of figures that a test gives."""

from __future__ import annotations

from typing import Any

from benchmarks import results
from benchmarks.cases import SINGLES
from benchmarks.suites import MEMORY, MEMORY_STEPS, SCALING, SIZES, SPEED, Measure

LOSS = 8.25


def measure_of(kind: str, model: str, contender: str, ranks: int, round_index: int = 0, layers: int | None = None) -> Measure:
    ranks = 1 if contender in SINGLES else ranks
    steps = MEMORY_STEPS if kind == MEMORY else 8
    return Measure(kind, model, contender, ranks, layers or SIZES[model]["layers"], steps, round_index)


def record_of(measure: Measure, **figures: Any) -> dict[str, Any]:
    """Returns a record; one of a measurement that went well unless `figures` has an "error" or a "missing"."""
    record = {"case": measure.label, **results.key_of(measure, {}), **figures}
    return record if {"error", "missing"} & set(figures) else {"warmup_losses": [LOSS], **record}


def speed(
    model: str, contender: str, ranks: int, tokens_per_second: float, round_index: int = 0, **figures: Any
) -> dict[str, Any]:
    measure = measure_of(SPEED, model, contender, ranks, round_index)
    return record_of(measure, tokens_per_second=tokens_per_second, cpu_seconds_per_step=0.5, **figures)


def memory(model: str, contender: str, ranks: int, growth_bytes: float) -> dict[str, Any]:
    measure = measure_of(MEMORY, model, contender, ranks)
    floor = measure.case.floor_bytes_per_parameter * 1e6
    return record_of(measure, growth_bytes=growth_bytes, floor_bytes=floor, growth_over_floor=growth_bytes / floor)


def scaling(contender: str, layers: int, *, build: float, per_parameter: float) -> dict[str, Any]:
    measure = measure_of(SCALING, "narrow", contender, 4, layers=layers)
    figures = {"build_seconds": build / 2, "first_step_seconds": build / 2, "build_and_trace_seconds": build}
    return record_of(measure, **figures, step_seconds=per_parameter * 1e6, step_seconds_per_parameter=per_parameter)
