"""The text form of a schedule: a row for each rank, a column for each time slot, `.` for an idle one.

0F0 0F1   .   . 0B0 0B1
  . 1F0 1F1 1B0 1B1   .
"""

import itertools
from collections.abc import Collection, Mapping, Sequence

from tfdist.extensions.pipeline.schedules.actions import Action

IDLE = "."

Table = Mapping[int, Sequence[Action | None]]

_SLOTS_BESIDE_A_MARK = 6


def format_grid(table: Table) -> str:
    """Returns the grid of `table`, without a header; the inverse of `parse_grid`."""
    rows = [[IDLE if action is None else str(action) for action in row] for row in table.values()]
    width = max(map(len, itertools.chain(*rows)), default=0)
    return "\n".join(" ".join(cell.rjust(width) for cell in row) for row in rows)


def parse_grid(text: str) -> list[list[Action | None]]:
    """Returns the rows of a grid, one for each line. Empty lines and those that start with # are left out.

    Raises:
        ValueError: a word is neither an action nor a dot.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return [[None if word == IDLE else Action.parse(word) for word in line.split()] for line in lines]


def render_grid(table: Table, marked: Collection[Action] = ()) -> str:
    """Returns the grid with the names of the ranks, for people to read.

        rank 0   0F0   0F1    .     .    0B0   0B1
        rank 1    .    1F0   1F1  >1B0<  1B1    .

    Actions that are `marked` stand between > and <. Of a long grid with marked actions only the slots near these are shown.
    """
    num_slots = max(map(len, table.values()), default=0)
    places = [slot for row in table.values() for slot, action in enumerate(row) if action in marked]
    first, last = 0, num_slots
    if places:
        first, last = max(0, min(places) - _SLOTS_BESIDE_A_MARK), min(num_slots, max(places) + _SLOTS_BESIDE_A_MARK + 1)
    cells = {rank: [_cell(action, marked) for action in row[first:last]] for rank, row in table.items()}
    width = max(map(len, itertools.chain(*cells.values())), default=0)
    label = max((len(str(rank)) for rank in table), default=0)
    lines = [f"rank {rank:>{label}}  {' '.join(cell.center(width) for cell in row)}".rstrip() for rank, row in cells.items()]
    if (first, last) != (0, num_slots):
        lines.insert(0, f"slots {first} to {last - 1} of {num_slots}:")
    return "\n".join(lines)


def _cell(action: Action | None, marked: Collection[Action]) -> str:
    text = IDLE if action is None else str(action)
    return f">{text}<" if action in marked else text
