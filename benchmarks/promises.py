"""What the project promises of `benchmarks.run`'s figures, and whether a run keeps it. Imports no TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from benchmarks.cases import DDP, FSDP2, MIRRORED, MW_MIRRORED, SINGLE, SINGLES, TORCH_SINGLE, Target
from benchmarks.figures import Figures, Spread, quotients
from benchmarks.suites import MEMORY, NARROW, SCALING, SCALING_LAYERS, SCALING_RANKS, SMALL, SPEED, WIDE, Measure

RANKS = (2, 4)
# Model, contender, the other, least tokens/s over the other's in the same round.
SPEEDS = (
    (SMALL, "zero3", FSDP2, 1.0),
    (SMALL, "zero3", "ds3", 1.0),
    (SMALL, "zero1", "ds1", 1.0),
    (SMALL, "zero2", "ds2", 1.0),
    (SMALL, "zero1", MW_MIRRORED, 1.05),
    (SMALL, "zero2", MW_MIRRORED, 1.05),
    (WIDE, "zero1", MW_MIRRORED, 1.5),
    (WIDE, "zero2", MW_MIRRORED, 1.5),
    (WIDE, "zero3", FSDP2, 1.0),
    (WIDE, "local-zero1", MIRRORED, 1.0),
    (WIDE, "local-zero2", MIRRORED, 1.0),
    (WIDE, "local-zero3", MIRRORED, 0.85),
)
# Contender, peer: speed over that of one process of its own framework, at least the peer's.
EFFICIENCIES = (("zero0", DDP), ("zero1", "ds1"), ("zero2", "ds2"), ("zero3", FSDP2), ("zero3", "ds3"))
# Of `wide` on 4 ranks: contender, most growth over the formula's floor, whose growth it must stay below.
MEMORIES = (("zero1", 1.25, ("ds1",)), ("zero2", 1.25, ("ds2",)), ("zero3", 1.5, (FSDP2, "ds3")))
MEMORY_RANKS = 4
GROWTH_LIMIT = 1.2  # seconds of a step per parameter, deepest model over the shallowest
BUILD_LIMIT = 1.2  # seconds until the end of the first step, over MirroredStrategy's


@dataclasses.dataclass(frozen=True)
class Promise:
    """A target, and what a run must measure to answer for it.

    Attributes:
        target: what is promised, and what was found.
        needs: (kind, model, contender, ranks) of all that it compares.
    """

    target: Target
    needs: frozenset[tuple[str, str, str, int]]

    def is_asked_of(self, measures: Collection[Measure]) -> bool:
        """Returns whether a run of these measurements was to answer for it."""
        return self.needs <= {(x.kind, x.model, x.contender, x.ranks) for x in measures}


def promises(figures: Figures) -> list[Promise]:
    """Returns all promises; those that these figures say nothing of have no value."""
    return [*_speeds(figures), *_efficiencies(figures), *_memories(figures), *_scaling(figures)]


def _at_least(text: str, limit: float, value: float | None, needs: list[tuple[str, str, str, int]]) -> Promise:
    target = Target(f"{text}, at least {limit:g}", value, value is not None and value >= limit)
    return Promise(target, frozenset(needs))


def _at_most(text: str, limit: float, value: float | None, needs: list[tuple[str, str, str, int]]) -> Promise:
    target = Target(f"{text}, at most {limit:g}", value, value is not None and value <= limit)
    return Promise(target, frozenset(needs))


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def _speeds(figures: Figures) -> list[Promise]:
    return [
        _at_least(
            f"{model}, {contender} x{ranks}: speed over {other}'s",
            limit,
            _median(figures.ratio(model, ranks, contender, other)),
            [_need(SPEED, model, name, ranks) for name in (contender, other)],
        )
        for ranks in RANKS
        for model, contender, other, limit in SPEEDS
    ]


def _efficiencies(figures: Figures) -> list[Promise]:
    found = []
    for ranks in RANKS:
        for contender, peer in EFFICIENCIES:
            own = figures.efficiencies(SMALL, ranks, contender, SINGLE)
            its = figures.efficiencies(SMALL, ranks, peer, TORCH_SINGLE)
            value = _median(Spread.of(list(quotients(own, its).values())))
            needs = [_need(SPEED, SMALL, name, ranks) for name in (contender, peer, SINGLE, TORCH_SINGLE)]
            found.append(_at_least(f"{SMALL}, {contender} x{ranks}: scaling efficiency over {peer}'s", 1.0, value, needs))
    return found


def _memories(figures: Figures) -> list[Promise]:
    found = []
    for contender, limit, others in MEMORIES:
        name = f"{WIDE}, {contender} x{MEMORY_RANKS}: peak memory over"
        own = _need(MEMORY, WIDE, contender, MEMORY_RANKS)
        found.append(_at_most(f"{name} the floor", limit, _median(figures.spread("growth_over_floor", *own)), [own]))
        for other in others:
            its = _need(MEMORY, WIDE, other, MEMORY_RANKS)
            ratios = quotients(figures.by_round("growth_bytes", *own), figures.by_round("growth_bytes", *its))
            value = _median(Spread.of(list(ratios.values())))
            target = Target(f"{name} {other}'s, below 1", value, value is not None and value < 1)
            found.append(Promise(target, frozenset([own, its])))
    return found


def _scaling(figures: Figures) -> list[Promise]:
    found = []
    few, many = min(SCALING_LAYERS), max(SCALING_LAYERS)
    mirrored = _need(SCALING, NARROW, MIRRORED, SCALING_RANKS)
    for contender in ("local-zero1", "local-zero3"):
        own = _need(SCALING, NARROW, contender, SCALING_RANKS)
        name = f"{NARROW}, {contender} x{SCALING_RANKS}:"
        costs = [figures.by_round("step_seconds_per_parameter", *own, layers) for layers in (many, few)]
        text = f"{name} seconds of a step per parameter, {many} layers over {few}"
        found.append(_at_most(text, GROWTH_LIMIT, _median(Spread.of(list(quotients(*costs).values()))), [own]))
        builds = [figures.by_round("build_and_trace_seconds", *case, many) for case in (own, mirrored)]
        text = f"{name} building and tracing {many} layers, over {MIRRORED}'s"
        value = _median(Spread.of(list(quotients(*builds).values())))
        found.append(_at_most(text, BUILD_LIMIT, value, [own, mirrored]))
    return found


def _need(kind: str, model: str, contender: str, ranks: int) -> tuple[str, str, str, int]:
    return kind, model, contender, 1 if contender in SINGLES else ranks
