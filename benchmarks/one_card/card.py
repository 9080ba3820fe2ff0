"""What every row is called with: the card, or the CPU in its place, split as the row asks."""

from __future__ import annotations

import dataclasses
import functools

from benchmarks.devices import take_devices


@dataclasses.dataclass(frozen=True)
class Card:
    """The devices of a row's process, which `run_in_process` makes for it.

    Attributes:
        is_gpu: whether a GPU is split; else logical CPUs take its place.
        is_quick: whether models and steps are tiny.
    """

    is_gpu: bool
    is_quick: bool

    @property
    def kind(self) -> str:
        return "GPU" if self.is_gpu else "CPU"

    @property
    def patience(self) -> float:
        """How much longer than a card's whole rows those of this one may take: somebody waits for a card."""
        return 1.0 if self.is_gpu and not self.is_quick else 5.0

    @functools.lru_cache  # noqa: B019 (one card a process)
    def devices(self, n: int) -> list[str]:
        """Splits the card in `n`; the rows of one process must ask for the same `n`."""
        return take_devices(n, n if self.is_gpu else 0)
