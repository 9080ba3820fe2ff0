"""What the records of a run come to: medians over rounds, and ratios within a round. Imports no TensorFlow."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Self

from benchmarks import peers
from benchmarks.cases import MIRRORED, MW_MIRRORED, SINGLE, SINGLES
from benchmarks.suites import SIZES, named

Record = dict[str, Any]
# Keras's own Adam takes an embedding's gradient as sparse rows: not quite the same update.
_SPARSE_ROWS = (SINGLE, MIRRORED, MW_MIRRORED)
SPARSE_ROWS_TOLERANCE = 1e-3  # of a loss, relative


@dataclasses.dataclass(frozen=True)
class Spread:
    """A figure over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """Returns None where there are no values."""
        return cls(statistics.median(values), min(values), max(values)) if values else None


class Figures:
    """Looks up figures by contender and number of ranks.

    Args:
        records: of one run. Those that failed and those of missing peers have no figures; they are kept to be shown.
    """

    def __init__(self, records: Iterable[Record]):
        self.records = list(records)
        self._good: dict[tuple[Any, ...], dict[int, Record]] = {}
        for record in self.records:
            if "error" not in record and "missing" not in record:
                key = _key(*(record[name] for name in ("kind", "model", "contender", "ranks", "layers")))
                self._good.setdefault(key, {})[record["round_index"]] = record

    def by_round(
        self, field: str, kind: str, model: str, contender: str, ranks: int, layers: int | None = None
    ) -> dict[int, float]:
        """Returns a field of the records of a case, by round. A contender of one rank has the same for all `ranks`."""
        layers = SIZES[model]["layers"] if layers is None else layers
        found = self._good.get(_key(kind, model, contender, ranks, layers), {})
        return {number: record[field] for number, record in found.items() if field in record}

    def spread(self, field: str, *case: Any) -> Spread | None:
        """Returns a field of the records of a case, over the rounds."""
        return Spread.of(list(self.by_round(field, *case).values()))

    def speeds(self, model: str, contender: str, ranks: int) -> dict[int, float]:
        return self.by_round("tokens_per_second", "speed", model, contender, ranks)

    def ratio(self, model: str, ranks: int, contender: str, other: str) -> Spread | None:
        """Returns a contender's speed over another's in the same round."""
        return Spread.of(list(quotients(self.speeds(model, contender, ranks), self.speeds(model, other, ranks)).values()))

    def efficiencies(self, model: str, ranks: int, contender: str, single: str) -> dict[int, float]:
        """Returns a contender's speed over that of one process of its framework, by round."""
        return quotients(self.speeds(model, contender, ranks), self.speeds(model, single, 1))


def quotients(own: dict[int, float], other: dict[int, float]) -> dict[int, float]:
    """Returns own / other for the rounds that both have."""
    return {number: own[number] / other[number] for number in own if number in other}


def _key(kind: str, model: str, contender: str, ranks: int, layers: int) -> tuple[Any, ...]:
    return kind, model, contender, 1 if contender in SINGLES else ranks, layers


# Losses


def loss_error(record: Record, records: Iterable[Record]) -> str | None:
    """Returns why a record's losses are not those of the same work, or None.

    They are compared with the first record of the same kind and model, after the warm-up; if possible one that updates every
    weight as PyTorch does.
    """
    if "error" in record or "missing" in record:
        return None
    same = [x for x in records if _work(x) == _work(record) and "error" not in x and "missing" not in x]
    reference = next((x for x in same if not _updates_sparse_rows(x)), same[0] if same else record)
    is_loose = _updates_sparse_rows(record) or _updates_sparse_rows(reference)
    tolerance = SPARSE_ROWS_TOLERANCE if is_loose else peers.LOSS_TOLERANCE
    expected = reference["warmup_losses"][0]
    losses = record["warmup_losses"]
    if all(abs(loss - expected) <= tolerance * abs(expected) for loss in losses):  # a comparison that NaN fails
        return None
    name = named(reference["contender"], reference["ranks"])
    return f"the loss, {losses}, is not that of {name}, {expected}, to {tolerance:g}: not the same work"


def checked(records: Iterable[Record]) -> list[Record]:
    """Returns the records, those that did not do the same work with an error."""
    records = list(records)
    found = [loss_error(record, records) for record in records]
    return [record if error is None else {**record, "error": error} for record, error in zip(records, found, strict=True)]


def _work(record: Record) -> tuple[Any, ...]:
    return record["kind"], record["model"], record["layers"]


def _updates_sparse_rows(record: Record) -> bool:
    return record["contender"] in _SPARSE_ROWS and SIZES[record["model"]]["model"] == "gpt"
