"""A schedule of a pipeline, as data: which rank does what, in which order."""

import dataclasses
from collections.abc import Iterable, Mapping

from tfdist.extensions.pipeline.schedules.actions import Action
from tfdist.extensions.pipeline.schedules.dataflow import earliest_starts
from tfdist.extensions.pipeline.schedules.grid import IDLE, format_grid, parse_grid, render_grid
from tfdist.extensions.pipeline.schedules.validation import sizes_of, validate


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The actions of every rank of a pipeline, in order, each in a slot of time.

        1f1b: 2 stages on 2 ranks, 3 microbatches

        rank 0  0F0 0F1  .  0B0 0F2 0B1  .  0B2        F(s, m) before F(s+1, m), B(s+1, m) before B(s, m)
        rank 1   .  1F0 1B0 1F1 1B1 1F2 1B2  .         stage s lives on rank s % num_ranks

    A schedule is a value: made and checked once, then run as often as wanted. Only the order of each rank's actions counts when
    it runs: the slots of time, and None for an idle slot, are for people to read, and a rank that is ready earlier starts
    earlier. A schedule that could be made can run: it is complete, and no rank waits for itself (`validate`).

    Args:
        table: for each rank a row of actions and None, all rows of equal length. `from_table` and `from_text` take looser forms.
        name: the name in messages and pictures.

    Attributes:
        num_stages: how many stages the model has; inferred from the table, like the next two.
        num_microbatches: how many microbatches a batch has.
        stages_per_rank: how many stages each rank has; with several the stages go around the ranks as often.

    Raises:
        ValueError: the table cannot run; see `validate`.
    """

    table: dict[int, tuple[Action | None, ...]] = dataclasses.field(repr=False, hash=False)
    name: str = "custom"
    num_stages: int = dataclasses.field(init=False)
    num_microbatches: int = dataclasses.field(init=False)
    stages_per_rank: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        validate(self.table)
        table = {rank: tuple(self.table[rank]) for rank in sorted(self.table)}
        sizes = dict(zip(("num_stages", "num_microbatches", "stages_per_rank"), sizes_of(table), strict=True))
        for name, value in {"table": table, **sizes}.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_table(
        cls, table: Mapping[int, Iterable[Action | str | None]] | Iterable[Iterable[Action | str | None]], *, name: str = "custom"
    ) -> "Schedule":
        """Returns the schedule of a table in a loose form.

        Args:
            table: {rank: row} or the rows in the order of the ranks. A row has actions, their texts ("2F0"), and None or "." for
                an idle slot; the end of a short row is idle.
            name: the name in messages and pictures.

        Raises:
            ValueError: a text is not an action, or the table cannot run; see `validate`.
        """
        rows = dict(table) if isinstance(table, Mapping) else dict(enumerate(table))
        read = {rank: [_read(entry) for entry in row] for rank, row in rows.items()}
        num_slots = max(map(len, read.values()), default=0)
        return cls({rank: (*row, *[None] * (num_slots - len(row))) for rank, row in read.items()}, name)

    @classmethod
    def from_text(cls, text: str, *, name: str = "custom") -> "Schedule":
        """Returns the schedule that a grid shows; the inverse of `to_text`.

        Args:
            text: a line for each rank, with actions and, for idle slots, dots between spaces. Empty lines and lines that start
                with # do not count.
            name: the name in messages and pictures.

        Raises:
            ValueError: a word is neither an action nor a dot, or the table cannot run; see `validate`.
        """
        return cls.from_table(parse_grid(text), name=name)

    def to_text(self) -> str:
        """Returns the grid, without a header; the inverse of `from_text`."""
        return format_grid(self.table)

    __str__ = to_text

    def render(self, mark: Action | None = None) -> str:
        """Returns the grid with the names of the ranks, and with the action `mark` between > and <.

        Of a long grid with a mark only the slots near the mark are shown.
        """
        return render_grid(self.table, () if mark is None else (mark,))

    def aligned(self) -> "Schedule":
        """Returns the same schedule with every action in the first slot after all actions that it waits for."""
        return Schedule(aligned_table(self.orders), self.name)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return self.num_stages // self.stages_per_rank

    def rank_of(self, stage_index: int) -> int:
        """Returns the rank that computes the stage."""
        return stage_index % self.num_ranks

    def actions(self, rank: int) -> list[Action]:
        """Returns the actions of `rank`, in order, without the idle slots."""
        return [action for action in self.table[rank] if action is not None]

    @property
    def orders(self) -> dict[int, list[Action]]:
        """`actions` of every rank."""
        return {rank: self.actions(rank) for rank in self.table}


def aligned_table(orders: Mapping[int, Iterable[Action]]) -> dict[int, tuple[Action | None, ...]]:
    """Returns the table of what each rank does, in order, with every action in the first slot after all that it waits for."""
    starts = earliest_starts(orders)
    num_slots = 1 + int(max(starts.values()))
    table: dict[int, list[Action | None]] = {rank: [None] * num_slots for rank in orders}
    for action, slot in starts.items():
        table[action.stage_index % len(table)][int(slot)] = action
    return {rank: tuple(row) for rank, row in table.items()}


def _read(entry: Action | str | None) -> Action | None:
    if isinstance(entry, str):
        return None if entry == IDLE else Action.parse(entry)
    return entry
