"""A `Schedule` from whatever a user may give as one: a name, a text, a table, a function."""

from collections.abc import Callable, Mapping
from typing import Any

from tfdist import errors
from tfdist.extensions.pipeline.schedules.actions import ACTION_TEXT
from tfdist.extensions.pipeline.schedules.published import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZeroBubble,
)
from tfdist.extensions.pipeline.schedules.schedule import Schedule

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleZeroBubble,
}


def make_schedule(
    schedule: str | Schedule | Mapping[int, Any] | Callable[[int, int, int], Schedule],
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    stages_per_rank: int | None = None,
) -> Schedule:
    """Returns a schedule by its name, from its text or table, or as it is.

    Args:
        schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble", in upper or lower case, or the name of the function that makes
            it; the text of a grid; a table {rank: row}; a `Schedule`; or a function like `Schedule1F1B` that makes one.
        num_stages: how many stages there are in all. A name and a function need it; a schedule that exists must agree with it, if
            it is given.
        num_microbatches: how many microbatches there are; needed and compared likewise.
        stages_per_rank: how many stages each rank has; compared likewise. A name and a function take None as 1.

    Raises:
        ValueError: `schedule` is none of these, sizes are missing or impossible, the schedule has other sizes than those given,
            or it cannot run (`validate`).
    """
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    if isinstance(schedule, Schedule):
        made = schedule
    elif isinstance(schedule, Mapping):
        made = Schedule.from_table(schedule)
    elif isinstance(schedule, str) and _key(schedule) not in _FUNCTIONS and any(map(ACTION_TEXT.fullmatch, schedule.split())):
        made = Schedule.from_text(schedule)  # judges the words that are no actions
    else:
        function = _FUNCTIONS.get(_key(schedule)) if isinstance(schedule, str) else schedule
        if not callable(function):
            raise errors.value_error(
                f"`schedule` must be one of {', '.join(map(repr, SCHEDULES))}, the text of a grid, a table, a `Schedule` or a "
                "function that makes one.",
                schedule=schedule,
                fix='A grid has a line for each rank: "0F0 0F1 0B0 0B1".',
            )
        if num_stages is None or num_microbatches is None:
            raise errors.value_error(
                "`num_stages` and `num_microbatches` must be given for a schedule that is yet to be made.",
                num_stages=num_stages,
                num_microbatches=num_microbatches,
            )
        made = function(num_stages, num_microbatches, 1 if stages_per_rank is None else stages_per_rank)
        if not isinstance(made, Schedule):
            raise errors.value_error(
                "`schedule`, a function, must return a `Schedule`.", returned=made, fix="See `Schedule.from_table`."
            )
    for name, expected in sizes.items():
        found = getattr(made, name)
        if expected is not None and found != expected:
            raise errors.value_error(
                f"`schedule` must have `{name}`={expected}, but has {found}.",
                schedule=made,
                fix="Pass a schedule of that size, or the name of one that is made for it.",
            )
    return made


def _key(name: str) -> str:
    """Returns a name without what people spell differently: of "Zero-Bubble" and "ScheduleZeroBubble" it is "zerobubble"."""
    return "".join(character for character in name.casefold() if character not in "-_ ").removeprefix("schedule")


_FUNCTIONS: dict[str, Callable[..., Schedule]] = {
    **{_key(name): function for name, function in SCHEDULES.items()},
    # Other names in use.
    "pipedreamflush": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "zb": ScheduleZeroBubble,
    "zbh1": ScheduleZeroBubble,
}
