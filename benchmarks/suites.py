"""What `benchmarks.run` measures: the cases of a suite. Imports no TensorFlow.

A contender's name says how its ranks run: "zero0" to "zero3" and "mw-mirrored" are workers, a process each, as PyTorch's are;
"mirrored" and "local-zero0" to "local-zero3" are logical CPUs of one process; "single" and "torch-single" have one rank.

"zero1-keras" to "zero3-keras" are "zero1" to "zero3" with Keras's own kernels: what distribution alone brings. They are measured
on `small` alone, since the layers of `wide` are computed by no kernel of tfdist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.cases import (
    DDP,
    DEEPSPEED_STAGES,
    FSDP2,
    KERAS_KERNELS,
    MIRRORED,
    MW_MIRRORED,
    SINGLE,
    SINGLES,
    TORCH_DATA,
    TORCH_SINGLE,
    ZERO_REDUNDANCY,
    ZERO_STAGES,
    Case,
)
from benchmarks.resident import MALLOC, TUNED

SPEED, MEMORY, SCALING = KINDS = ("speed", "memory", "scaling")
SMALL, WIDE, NARROW = MODELS = ("small", "wide", "narrow")
SIZES: dict[str, dict[str, Any]] = {
    SMALL: {
        "model": "gpt",
        "layers": 4,
        "width": 256,
        "heads": 4,
        "vocabulary": 8192,
        "sequence_length": 128,
        "global_batch_size": 16,
    },
    WIDE: {"model": "mlp", "layers": 8, "width": 2048, "global_batch_size": 64},
    NARROW: {"model": "gpt", "width": 64, "heads": 4, "vocabulary": 256, "sequence_length": 32, "global_batch_size": 16},
}
SCALING_LAYERS = (4, 8, 16, 32)
SCALING_RANKS = 4

LOCAL = {f"local-{contender}": contender for contender in ZERO_STAGES}
# Those that are compared stand side by side: they run one after the other.
_STAGE_1, _STAGE_2, _STAGE_3 = ((f"zero{stage}", f"zero{stage}-keras") for stage in (1, 2, 3))
WORKERS = (MW_MIRRORED, DDP, "zero0", ZERO_REDUNDANCY, "ds1", *_STAGE_1, "ds2", *_STAGE_2, FSDP2, *_STAGE_3, "ds3")
CONTENDERS = (*SINGLES, *WORKERS, MIRRORED, *LOCAL)
SCALING_CONTENDERS = (MIRRORED, "local-zero1", "local-zero3")
# By kind: who can take part.
POSSIBLE = {SPEED: CONTENDERS, MEMORY: (*SINGLES, *WORKERS, *SCALING_CONTENDERS), SCALING: SCALING_CONTENDERS}

MIN_STEPS = 8
MEMORY_STEPS = 6  # of which all count: the peak is a maximum
# By kind: variables of every process.
ENVIRONMENTS = {SPEED: TUNED, SCALING: TUNED, MEMORY: MALLOC}


@dataclasses.dataclass(frozen=True)
class Suite:
    """What is measured unless told otherwise; see `benchmarks.run` for the fields."""

    kinds: tuple[str, ...]
    models: tuple[str, ...]
    ranks: tuple[int, ...]
    contenders: tuple[str, ...]
    rounds: int
    steps: int


SUITES = {
    "quick": Suite(
        kinds=(SPEED,),
        models=(SMALL, WIDE),
        ranks=(2,),
        contenders=(SINGLE, TORCH_SINGLE, MW_MIRRORED, DDP, "ds1", *_STAGE_1, *_STAGE_2, FSDP2, *_STAGE_3, "ds3"),
        rounds=2,
        steps=8,
    ),
    "full": Suite(kinds=KINDS, models=MODELS, ranks=(2, 4), contenders=CONTENDERS, rounds=3, steps=10),
}


@dataclasses.dataclass(frozen=True)
class Measure:
    """One case of a suite, in one round.

    Attributes:
        kind: "speed", "memory" or "scaling".
        model: "small", "wide" or "narrow".
        contender: its name on the command line.
        ranks: how many; 1 for the singles.
        layers: of the model.
        steps: that are timed, or during which the memory is watched.
        round_index: from 0.
    """

    kind: str
    model: str
    contender: str
    ranks: int
    layers: int
    steps: int
    round_index: int = 0

    @property
    def case(self) -> Case:
        return Case(
            contender={**LOCAL, **KERAS_KERNELS}.get(self.contender, self.contender),
            devices=self.ranks,
            multi_worker=self.contender in (MW_MIRRORED, *ZERO_STAGES, *KERAS_KERNELS),
            use_kernels=False if self.contender in KERAS_KERNELS else None,
            **{**SIZES[self.model], "layers": self.layers},
        )

    @property
    def label(self) -> str:
        layers = f" of {self.layers}" if self.kind == SCALING else ""
        return f"{self.kind} {self.model}{layers} {named(self.contender, self.ranks)}"

    @property
    def examples_per_step(self) -> int:
        """Tokens of a gpt's step, examples of an mlp's."""
        case = self.case
        return case.global_batch_size * (case.sequence_length if case.model == "gpt" else 1)


def named(contender: str, ranks: int) -> str:
    """Returns how tables call a contender."""
    return contender if contender in SINGLES else f"{contender} x{ranks}"


def package_of(contender: str) -> str | None:
    """Returns what PyTorch's Python must be able to import for a contender; None for those of TensorFlow."""
    if contender in DEEPSPEED_STAGES:
        return "deepspeed"
    return "torch" if contender in TORCH_DATA else None


def select(
    *,
    kinds: Sequence[str],
    models: Sequence[str],
    ranks: Sequence[int],
    contenders: Sequence[str],
    rounds: int,
    steps: int,
) -> list[Measure]:
    """Returns the measurements, in the order in which they run: all of round 0, all of round 1, ...

    In each round the order of the contenders is rotated by one more. Memory is no matter of speed: one round measures it.
    """
    chosen = [contender for contender in CONTENDERS if contender in contenders]
    measures = []
    for round_index in range(rounds):
        for kind in KINDS:
            if kind not in kinds or (kind == MEMORY and round_index):
                continue
            for model, layers in _sizes(kind, models):
                entrants = [x for x in chosen if x in POSSIBLE[kind] and (model != WIDE or x not in KERAS_KERNELS)]
                taken = [
                    Measure(kind, model, contender, number, layers, _steps(kind, layers, steps), round_index)
                    for number, group in _groups(kind, entrants, ranks)
                    for contender in _rotated(group, round_index)
                ]
                measures += taken
    return measures


def _steps(kind: str, layers: int, steps: int) -> int:
    """Returns how many steps are run: of a shallower model of the scaling as many more as take about as long."""
    if kind == MEMORY:
        return MEMORY_STEPS
    return steps * max(SCALING_LAYERS) // layers if kind == SCALING else steps


def _sizes(kind: str, models: Sequence[str]) -> list[tuple[str, int]]:
    """Returns the models of a kind with their layers."""
    if kind == SCALING:
        return [(NARROW, layers) for layers in SCALING_LAYERS if NARROW in models]
    return [(model, SIZES[model]["layers"]) for model in MODELS if model in models and model != NARROW]


def _groups(kind: str, entrants: list[str], ranks: Sequence[int]) -> list[tuple[int, list[str]]]:
    """Returns the numbers of ranks, each with its contenders."""
    if kind == SCALING:
        return [(number, entrants) for number in ranks if number == SCALING_RANKS]
    singles = [contender for contender in entrants if contender in SINGLES]
    return [(1, singles), *((number, [x for x in entrants if x not in SINGLES]) for number in ranks)]


def _rotated(contenders: list[str], by: int) -> list[str]:
    shift = by % len(contenders) if contenders else 0
    return [*contenders[shift:], *contenders[:shift]]
