"""Part c: what a strategy of one rank costs, beside plain Keras on the same device; and PyTorch's beside plain PyTorch.

One GPT, its weights, batch and AdamW the same for all (`benchmarks.training`, `benchmarks.torch_data`). The goal is 3 % over
plain Keras. Float32 is multiplied in TensorFloat-32 on GPUs that have it, by both frameworks.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from benchmarks import measuring
from benchmarks.cases import DDP, FSDP2, SINGLE, TORCH_SINGLE, Case
from benchmarks.devices import allocators_of, own_devices
from benchmarks.job import Job
from benchmarks.one_card.card import Card
from benchmarks.one_card.rows import Part, Row
from benchmarks.training import DataLoop, build_strategy
from tfdist.tools.doctor.check import Finding, Result, Status

GOAL = 0.03
KERAS, KERAS_BFLOAT16, TORCH = "Keras", "Keras, mixed_bfloat16", "PyTorch"
# By what a row's losses may differ from its baseline's, relative to it: the largest of rounding in its dtype.
_LOSS_TOLERANCES = {"float32": 1e-3, "mixed_bfloat16": 2e-2}
_KERNELS = {"use_kernels": True}
_NO_KERNELS = {"use_kernels": False}
_BFLOAT16 = {"policy": "mixed_bfloat16"}
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    KERAS: (SINGLE, {}),
    "stage 3": ("zero3", _NO_KERNELS),
    "stage 0": ("zero0", _NO_KERNELS),
    "stage 3, tfdist's kernels": ("zero3", _KERNELS),
    TORCH: (TORCH_SINGLE, {}),
    "FSDP2": (FSDP2, {}),
    "Keras, jit_compile": (SINGLE, {"jit_compile": True}),
    "stage 3, auto-clustering": ("zero3", {**_NO_KERNELS, "auto_clustering": True}),
    KERAS_BFLOAT16: (SINGLE, _BFLOAT16),
    "stage 3, mixed_bfloat16": ("zero3", {**_NO_KERNELS, **_BFLOAT16}),
    "DDP": (DDP, {}),
    "stage 2": ("zero2", _NO_KERNELS),
    "stage 1": ("zero1", _NO_KERNELS),
}
_QUICK = (KERAS, "stage 3", "stage 3, tfdist's kernels")
_BASELINES = {
    **dict.fromkeys(("FSDP2", "DDP"), TORCH),
    "stage 3, mixed_bfloat16": KERAS_BFLOAT16,
}
_SIZES: dict[str, dict[str, int]] = {
    "GPU": {"layers": 12, "width": 1024, "heads": 16, "sequence_length": 512, "vocabulary": 32768, "global_batch_size": 8},
    "CPU": {"layers": 4, "width": 384, "heads": 6, "sequence_length": 128, "vocabulary": 4096, "global_batch_size": 4},
    "quick": {"layers": 1, "width": 32, "heads": 2, "sequence_length": 16, "vocabulary": 64, "global_batch_size": 2},
}
_ROUNDS = 5
_STEPS = 6  # of a round


def part(card: Card) -> Part:
    """Returns the rows, each in a process."""
    names = _QUICK if card.is_quick else tuple(CONTENDERS)
    return Part(
        name="cost",
        rows=[_row(name, card) for name in names],
        shares_process=False,
        columns={
            "step ms": lambda x: f"{1000 * x['step_seconds']:.2f}" if "step_seconds" in x else None,
            "over": lambda x: x.get("baseline"),
            "costs": lambda x: f"{x['overhead']:+.1%}" if "overhead" in x else None,
            "tokens/s": lambda x: f"{x['tokens_per_second']:,.0f}" if "tokens_per_second" in x else None,
            "peak MiB": lambda x: f"{x['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in x else None,
            "first step s": lambda x: f"{x['to_first_step_seconds']:.1f}" if "to_first_step_seconds" in x else None,
            "loss": lambda x: f"{x['warmup_loss']:.5f}" if "warmup_loss" in x else None,
        },
        text=f"A GPT on one rank; a step is the median round of {_STEPS} steps in a row. `costs`: over the baseline of the same "
        f"framework and dtype; the goal is {GOAL:.0%} over Keras. The first step's time begins with building the model. "
        "A step with `compile(jit_compile=True)` is refused under a strategy, of one rank too: only Keras alone has that row.",
        seconds=165,
        row_seconds=120,
        relate=related,
    )


def _row(name: str, card: Card) -> Row:
    contender, fields = CONTENDERS[name]
    sizes = _SIZES["quick" if card.is_quick else card.kind]
    case = Case(contender, "gpt", 1, logical_gpus=int(card.is_gpu), **{**sizes, **fields})
    rounds = 2 if card.is_quick else _ROUNDS
    if case.is_torch:
        return Row(name, peer=case, judge=functools.partial(_judge_peer, case, rounds))
    return Row(name, run=functools.partial(_train, case, rounds))


def _train(case: Case, rounds: int, card: Card) -> Finding:
    strategy = build_strategy(case)
    memory = allocators_of(own_devices(case))
    answers: list[dict[str, Any]] = []
    requests = iter([{"steps": _STEPS}] * rounds)
    measuring.measure_rounds(lambda: DataLoop(case, strategy), _describe, memory, answers.append, requests)
    return _finding(case, answers[0], answers[1:])


def _describe(loop: Any) -> dict[str, Any]:
    return {"parameters": sum(int(tf.size(variable)) for variable in loop.model.trainable_variables)}


def _judge_peer(case: Case, rounds: int, job: Job) -> Finding:
    return _finding(case, job.ready[0], [job.ask({"steps": _STEPS})[0] for _ in range(rounds)])


def _finding(case: Case, ready: dict[str, Any], answers: Sequence[dict[str, Any]]) -> Finding:
    seconds = statistics.median(answer["seconds"] for answer in answers) / _STEPS
    peaks = [answer["peak_bytes"] for answer in answers if "peak_bytes" in answer]
    data = {
        **ready,
        "case": dataclasses.asdict(case),
        "step_seconds": seconds,
        "step_seconds_by_round": [answer["seconds"] / _STEPS for answer in answers],
        "cpu_seconds": statistics.median(answer["cpu_seconds"] for answer in answers),
        "tokens_per_second": case.global_batch_size * case.sequence_length / seconds,
        "to_first_step_seconds": ready["build_seconds"] + ready["first_step_seconds"],
        **({"peak_bytes": max(peaks)} if peaks else {}),
    }
    return Finding(f"{1000 * seconds:.2f} ms a step", data)


def related(result: Result, before: Sequence[Result]) -> Result:
    """Adds what the row costs over its baseline; it fails where its loss is not the baseline's."""
    baseline = _BASELINES.get(result.name, KERAS)
    own = {one.name: one.data for one in before}.get(baseline)
    if not own or "step_seconds" not in own or "step_seconds" not in result.data:
        return result
    overhead = result.data["step_seconds"] / own["step_seconds"] - 1
    data = {**result.data, "baseline": baseline, "overhead": overhead}
    summary = f"{result.summary}, {overhead:+.1%} over {baseline}"
    loss, its = result.data["warmup_loss"], own["warmup_loss"]
    tolerance = _LOSS_TOLERANCES[result.data["case"]["policy"]]
    if not abs(loss - its) <= tolerance * abs(its):  # a comparison that NaN fails
        summary = f"the loss {loss} is not that of {baseline}, {its}: {summary}"
        return dataclasses.replace(result, status=Status.FAILS, data=data, summary=summary)
    return dataclasses.replace(result, data=data, summary=summary)
