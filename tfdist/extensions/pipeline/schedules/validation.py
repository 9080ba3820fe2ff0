"""Whether a schedule can run: it is complete, every action is on its rank, and no rank waits for itself.

Note: order of microbatches. Any order that the flow of data permits is legal, also one in which a stage takes microbatch 1
before 0. Results are addressed by stage and microbatch, and the gradient is a sum over the microbatches, which another order
changes by rounding only.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tfdist import errors
from tfdist.extensions.pipeline.schedules.actions import Action, Phase
from tfdist.extensions.pipeline.schedules.dataflow import earliest_starts, held_activations, inputs_of
from tfdist.extensions.pipeline.schedules.grid import Table, render_grid

Orders = Mapping[int, Sequence[Action]]

# How a microbatch goes through a stage.
_WAYS = [{Phase.FORWARD, Phase.BACKWARD}, {Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT}]


def validate(schedule: Table | Any, *, max_in_flight: int | None = None) -> None:
    """Checks that a schedule can run; a `Schedule` was checked when it was made, except for `max_in_flight`.

    Args:
        schedule: a `Schedule`, or the table of one: {rank: actions, None for an idle slot}.
        max_in_flight: the most activations, counted in (stage, microbatch), that a rank may hold at a time; None: any number.

    Raises:
        ValueError: the rows do not make a table; the number of ranks does not divide the number of stages. Or an action is
            missing, there twice or on another rank than `stage_index % num_ranks`; actions wait for each other in a circle; or a
            rank holds more than `max_in_flight`. The error's text ends with the grid, in which the actions in question are
            marked.
    """
    table = getattr(schedule, "table", schedule)
    num_stages, num_microbatches, _ = sizes_of(table)
    orders = {rank: [action for action in row if action is not None] for rank, row in table.items()}
    _check_places(table, orders)
    _check_complete(table, orders, num_stages, num_microbatches)
    _check_inputs(table, orders)
    _check_circles(table, orders)
    if max_in_flight is not None:
        _check_held(table, orders, max_in_flight)


def sizes_of(table: Table) -> tuple[int, int, int]:
    """Returns (num_stages, num_microbatches, stages_per_rank) of a table, as its highest stage and microbatch show them.

    Raises:
        ValueError: the rows do not make a table, or the ranks cannot have equally many stages.
    """
    num_ranks = len(table)
    if not num_ranks or set(table) != set(range(num_ranks)):
        raise errors.value_error("`table` must have a row for each of the ranks 0, 1, ..., and no other.", ranks=list(table))
    wrong = [entry for row in table.values() for entry in row if not isinstance(entry, Action | None)]
    if wrong:
        raise errors.value_error(
            "`table` must hold actions, and None for idle slots.",
            entry=wrong[0],
            fix="`Schedule.from_table` reads the text of actions too.",
        )
    lengths = {rank: len(row) for rank, row in table.items()}
    if len(set(lengths.values())) > 1:
        raise errors.value_error(
            "`table` must have rows of equal lengths.", slots=lengths, fix="`Schedule.from_table` fills them with idle slots."
        )
    actions = [action for row in table.values() for action in row if action is not None]
    if not actions:
        raise errors.value_error("`table` must hold at least one action.", slots=lengths)
    num_stages = 1 + max(action.stage_index for action in actions)
    if num_stages % num_ranks:
        raise _error(
            table,
            f"`table` must have equally many stages on each rank, but {num_ranks} does not divide the {num_stages} from 0 to "
            f"{num_stages - 1}.",
            [action for action in actions if action.stage_index == num_stages - 1],
            num_ranks=num_ranks,
            num_stages=num_stages,
        )
    return num_stages, 1 + max(action.microbatch for action in actions), num_stages // num_ranks


def _check_places(table: Table, orders: Orders) -> None:
    for rank, actions in orders.items():
        for action in actions:
            place = action.stage_index % len(orders)
            if place != rank:
                stage = f"stage {action.stage_index} belongs to rank {action.stage_index} % {len(orders)}"
                raise _error(table, f"`schedule` must run {action} on rank {place}: {stage}.", [action], rank=rank)
        for action, times in Counter(actions).items():
            if times > 1:
                raise _error(table, f"`schedule` must run {action} once.", [action], times=times)


def _check_complete(table: Table, orders: Orders, num_stages: int, num_microbatches: int) -> None:
    phases: dict[tuple[int, int], set[Phase]] = {}
    for action in itertools.chain(*orders.values()):
        phases.setdefault((action.stage_index, action.microbatch), set()).add(action.phase)
    for stage_index, microbatch in itertools.product(range(num_stages), range(num_microbatches)):
        there = phases.get((stage_index, microbatch), set())
        if there not in _WAYS:
            forward, backward, of_input, of_weight = every = [Action(stage_index, phase, microbatch) for phase in Phase]
            found = [action for action in every if action.phase in there]
            expected = (
                f"`schedule` must take every microbatch through every stage: microbatch {microbatch} through stage "
                f"{stage_index} by {forward} and {backward}, or by {forward}, {of_input} and {of_weight}."
            )
            raise _error(table, expected, found, actions=[str(action) for action in found])


def _check_inputs(table: Table, orders: Orders) -> None:
    for rank, actions in orders.items():
        not_yet = set(actions)
        for action in actions:
            for late in inputs_of(action, not_yet):
                expected = f"`schedule` must run {late} before {action}, which needs its result; rank {rank} runs it after."
                raise _error(table, expected, [action])
            not_yet.remove(action)


def _check_circles(table: Table, orders: Orders) -> None:
    starts = earliest_starts(orders)
    heads = {rank: next((action for action in actions if action not in starts), None) for rank, actions in orders.items()}
    stuck = [rank for rank, head in heads.items() if head is not None]
    if not stuck:
        return
    # Every stuck rank waits for an action on another one, which is stuck too: following them leads into the circle.
    there = set(itertools.chain(*orders.values()))
    needed = {rank: next(action for action in inputs_of(heads[rank], there) if action not in starts) for rank in stuck}
    followed = [stuck[0]]
    while (rank := needed[followed[-1]].stage_index % len(orders)) not in followed:
        followed.append(rank)
    circle = followed[followed.index(rank) :]
    links = []
    for rank in circle:
        other = needed[rank].stage_index % len(orders)
        behind = "" if heads[other] == needed[rank] else f", which rank {other} runs after {heads[other]}"
        links.append(f"{heads[rank]} (rank {rank}) waits for {needed[rank]}{behind}")
    expected = f"`schedule` must not let ranks wait for each other in a circle: {'; '.join(links)}."
    marked = [heads[rank] for rank in circle]
    raise _error(table, expected, marked, fix="Move one of the actions that are waited for forward.")


def _check_held(table: Table, orders: Orders, max_in_flight: int) -> None:
    for rank, actions in orders.items():
        for action, held in zip(actions, held_activations(actions), strict=True):
            if held > max_in_flight:
                expected = (
                    f"`schedule` must hold the activations of at most {max_in_flight} microbatches of a stage on a rank; at "
                    f"{action} rank {rank} holds {held}."
                )
                fix = "Run a backward (B or W) first, or allow more."
                raise _error(table, expected, [action], max_in_flight=max_in_flight, fix=fix)


def _error(table: Table, expected: str, marked: Collection[Action], **details: Any) -> ValueError:
    return ValueError(f"{errors.message(expected, **details)}\n{render_grid(table, marked)}")
