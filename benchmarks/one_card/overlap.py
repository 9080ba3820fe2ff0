"""Part d: where the time of a step of stages 1 to 3 goes on two logical devices, by a trace of TensorFlow's profiler.

Of a GPU: its streams' kernels and copies, how much of the copies passes behind kernels, and the time in which no stream has
anything to do, because the host has started nothing yet. Parts of one card talk through TensorFlow's ring, which the host drives:
this shows what waits for it, not what NCCL would do between cards (`benchmarks.gpu_timeline` does that without one).
"""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.cases import Case
from benchmarks.one_card import trace
from benchmarks.one_card.card import Card
from benchmarks.one_card.rows import Part, Row
from benchmarks.training import DataLoop, build_strategy
from tfdist.tools.doctor.check import Finding

_RANKS = 2
_STEPS = 3
_SIZES: dict[str, dict[str, int]] = {
    "GPU": {"layers": 8, "width": 1024, "heads": 16, "sequence_length": 512, "vocabulary": 8192, "global_batch_size": 8},
    "CPU": {"layers": 2, "width": 256, "heads": 4, "sequence_length": 64, "vocabulary": 1024, "global_batch_size": 4},
    "quick": {"layers": 1, "width": 32, "heads": 2, "sequence_length": 16, "vocabulary": 64, "global_batch_size": 2},
}


def part(card: Card) -> Part:
    """Returns the rows, each in a process."""
    stages = (3,) if card.is_quick else (3, 2, 1)
    times = {"step": "step_ms", "compute": "compute_ms", "messages": "messages_ms", "hidden": "hidden_ms"}
    what = (
        "kernels on the GPU's streams, `messages`: copies on them, `idle`: no stream has anything to do"
        if card.is_gpu
        else "products on the CPUs, `messages`: collectives, `idle`: no operation runs. CPUs have no streams"
    )
    return Part(
        name="overlap",
        rows=[Row(f"stage {stage}", functools.partial(_trace, f"zero{stage}")) for stage in stages],
        shares_process=False,
        columns={
            **{f"{heading} ms": functools.partial(_milliseconds, field) for heading, field in times.items()},
            "idle": lambda x: f"{x['idle_share']:.0%}" if "idle_share" in x else None,
            "gaps a step": lambda x: f"{x['gaps_per_step']:.0f}" if "gaps_per_step" in x else None,
            "longest us": lambda x: f"{x['longest_gap_us']:.0f}" if "longest_gap_us" in x else None,
            "seen": lambda x: x.get("seen"),
        },
        text=f"{_STEPS} steps of a GPT in a row on {_RANKS} logical devices, traced; milliseconds of a step. `compute`: {what}; "
        "`hidden`: the part of `messages` that passes while something is computed. What took most time is in the JSON lines.",
        seconds=60,
        row_seconds=60,
    )


def _milliseconds(field: str, record: dict[str, Any]) -> str | None:
    return f"{record[field]:.2f}" if field in record else None


def _trace(contender: str, card: Card) -> Finding:
    sizes = _SIZES["quick" if card.is_quick else card.kind]
    case = Case(contender, "gpt", _RANKS, logical_gpus=_RANKS if card.is_gpu else 0, use_kernels=False, **sizes)
    loop = DataLoop(case, build_strategy(case))
    loop.run(3)
    found = trace.record(lambda: loop.run(_STEPS))
    if not found.gpu and not found.host:
        raise RuntimeError("the profiler's trace has neither a stream nor an operation")
    figures = found.figures(_STEPS)
    summary = f"step {figures['step_ms']:.2f} ms, computing {figures['compute_ms']:.2f}, idle {figures['idle_share']:.0%}"
    if card.is_gpu and not found.gpu:
        summary += "; the trace has no streams of the GPU (no CUPTI): host only"
    return Finding(summary, {"ranks": _RANKS, **figures})
