"""The records of a run as text: a table for each model and number of ranks. Imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import cases
from benchmarks.cases import DDP, FSDP2, KERAS_KERNELS, MW_MIRRORED, SINGLE, TORCH_DATA, TORCH_SINGLE
from benchmarks.figures import Figures, Spread
from benchmarks.suites import CONTENDERS, MEMORY, NARROW, SCALING, SCALING_CONTENDERS, SCALING_LAYERS, SIZES, SPEED, named

# What PyTorch and DeepSpeed have for a stage.
PEER = {SINGLE: TORCH_SINGLE, MW_MIRRORED: DDP, "zero0": DDP, "zero1": "ds1", "zero2": "ds2", "zero3": FSDP2}
PEER |= {contender: PEER[stage] for contender, stage in KERAS_KERNELS.items()}
HEADER = "rounds,x mw-mirrored,range,peer,x peer,range,efficiency,CPU ms,peak MB,/floor,".split(",")


def tables(figures: Figures) -> str:
    """Returns the tables of all that was measured, with what failed and what is missing below."""
    data = [x for x in figures.records if x["kind"] != SCALING]
    parts = [
        f"{model}, {ranks} rank{'s' if ranks > 1 else ''}\n{_data_table(figures, model, ranks)}"
        for model in dict.fromkeys(x["model"] for x in data)
        for ranks in sorted({x["ranks"] for x in data if x["model"] == model} - {1}) or [1]
    ]
    parts += [
        f"{NARROW}, {ranks} logical CPUs of one process\n{_scaling_table(figures, ranks)}"
        for ranks in sorted({x["ranks"] for x in figures.records if x["kind"] == SCALING})
    ]
    return "\n\n".join([*parts, *_notes(figures)])


def _data_table(figures: Figures, model: str, ranks: int) -> str:
    unit = "tokens/s" if SIZES[model]["model"] == "gpt" else "examples/s"
    present = {x["contender"] for x in figures.records if x["model"] == model and x["ranks"] in (1, ranks)}
    rows = [_data_row(figures, model, ranks, contender) for contender in CONTENDERS if contender in present]
    return cases.table(["contender", unit, *HEADER], rows)


def _data_row(figures: Figures, model: str, ranks: int, contender: str) -> list[Any]:
    speed = figures.spread("tokens_per_second", SPEED, model, contender, ranks)
    peer = PEER.get(contender, "")
    single = TORCH_SINGLE if contender in TORCH_DATA else SINGLE
    efficiency = Spread.of(list(figures.efficiencies(model, ranks, contender, single).values()))
    processor = figures.spread("cpu_seconds_per_step", SPEED, model, contender, ranks)
    growth = figures.spread("growth_bytes", MEMORY, model, contender, ranks)
    over = figures.spread("growth_over_floor", MEMORY, model, contender, ranks)
    return [
        named(contender, ranks),
        _median(speed, digits=0 if SIZES[model]["model"] == "gpt" else 1),
        len(figures.speeds(model, contender, ranks)) or None,
        *_with_range(figures.ratio(model, ranks, contender, MW_MIRRORED)),
        peer,
        *(_with_range(figures.ratio(model, ranks, contender, peer)) if peer else ["", ""]),
        _median(efficiency),
        _median(processor, 1e3, digits=0),
        _median(growth, 1e-6, digits=0),
        _median(over),
        _state(figures, model, ranks, contender),
    ]


def _scaling_table(figures: Figures, ranks: int) -> str:
    rows = [
        [
            f"{contender} x{ranks}",
            layers,
            _median(figures.spread("build_seconds", *case)),
            _median(figures.spread("first_step_seconds", *case)),
            _median(figures.spread("build_and_trace_seconds", *case)),
            _median(figures.spread("step_seconds", *case), 1e3, digits=1),
            _median(figures.spread("step_seconds_per_parameter", *case), 1e9, digits=1),
            "" if figures.spread("step_seconds", *case) else "not measured",
        ]
        for contender in SCALING_CONTENDERS
        for layers in SCALING_LAYERS
        if (case := (SCALING, NARROW, contender, ranks, layers))
        and any((x["kind"], x["contender"], x["layers"]) == (SCALING, contender, layers) for x in figures.records)
    ]
    header = ["contender", "layers", "build s", "first step s", "both s", "step ms", "ns/parameter", ""]
    return cases.table(header, rows)


def _state(figures: Figures, model: str, ranks: int, contender: str) -> str:
    """Returns "failed" or "missing" where a contender's records say so."""
    own = [
        record
        for record in figures.records
        if (record["model"], record["contender"]) == (model, contender) and record["ranks"] in (1, ranks)
    ]
    if any("error" in record for record in own):
        return "failed"
    return "missing" if any("missing" in record for record in own) else ""


def _notes(figures: Figures) -> Iterator[str]:
    """Yields what failed and what is missing, each reason once."""
    for word, field in (("missing", "missing"), ("failed", "error")):
        by_reason: dict[str, list[str]] = {}
        for record in figures.records:
            if field in record:
                by_reason.setdefault(record[field], []).append(record["case"])
        for reason, names in by_reason.items():
            listed = ", ".join(dict.fromkeys(names))
            yield f"{word}: {listed}: {reason}"


def _median(spread: Spread | None, scale: float = 1, digits: int = 2) -> str | None:
    return None if spread is None else cases.number(spread.median * scale, digits)


def _with_range(spread: Spread | None) -> list[str | None]:
    if spread is None:
        return [None, ""]
    return [cases.number(spread.median), f"{spread.low:.2f} .. {spread.high:.2f}"]
