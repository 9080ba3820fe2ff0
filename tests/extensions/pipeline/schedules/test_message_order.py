"""One order of all messages, in which ranks whose messages wait for each other come through."""

import itertools

import pytest

from tfdist.extensions.pipeline.schedules.dataflow import inputs_of
from tfdist.extensions.pipeline.schedules.make_schedule import make_schedule
from tfdist.extensions.pipeline.schedules.messages import Message, events

SIZES = [
    (name, num_stages, num_microbatches, 1)
    for name, num_stages, num_microbatches in itertools.product(("gpipe", "1f1b", "zero_bubble"), (2, 3, 5), (1, 3, 8))
] + [("interleaved", 4, 4, 2), ("interleaved", 6, 6, 3), ("interleaved", 8, 8, 2)]


def come_through(orders):
    """Whether ranks that do one thing after the other come to their ends, where a message needs both of its ranks at once."""
    left = {rank: list(order) for rank, order in orders.items()}
    moved = True
    while moved:
        moved = False
        for rank, order in left.items():
            while order:
                others = [r for r, o in left.items() if r != rank and o and o[0] == order[0]]
                if isinstance(order[0], Message) and not others:
                    break
                for one in [rank, *others] if isinstance(order[0], Message) else [rank]:
                    left[one].pop(0)
                moved = True
    return not any(left.values())


@pytest.mark.parametrize("sizes", SIZES)
def test_all_ranks_come_through(sizes):
    schedule = make_schedule(*sizes)
    orders = {rank: events(schedule, rank) for rank in schedule.table}
    assert come_through(orders)
    actions = {action for order in schedule.orders.values() for action in order}
    for rank, order in orders.items():
        assert [event for event in order if not isinstance(event, Message)] == schedule.actions(rank)
        messages = [event for event in order if isinstance(event, Message)]
        assert len(set(messages)) == len(messages)
        for message in messages:
            mine = [event for event in (message.source, message.taker) if event in order]
            assert len(mine) == 1 and message.source in inputs_of(message.taker, actions)
            assert (order.index(mine[0]) < order.index(message)) == (mine[0] == message.source)
    # Every result that another rank needs is sent once and received once.
    expected = {
        Message(source, action)
        for action in actions
        for source in inputs_of(action, actions)
        if schedule.rank_of(source.stage_index) != schedule.rank_of(action.stage_index)
    }
    found = [event for order in orders.values() for event in order if isinstance(event, Message)]
    assert sorted(map(str, found)) == sorted(map(str, [*expected, *expected]))


@pytest.mark.parametrize(("name", "comes_through"), [("gpipe", True), ("1f1b", False)])
def test_receiving_where_it_is_needed_is_no_such_order(name, comes_through):
    """Each rank sends when it has, and receives when it needs: two ranks of 1f1b then both send before they receive."""
    schedule = make_schedule(name, 2, 4)
    orders = {}
    for rank in schedule.table:
        messages = {event for event in events(schedule, rank) if isinstance(event, Message)}
        orders[rank] = []
        for action in schedule.actions(rank):
            orders[rank] += [message for message in messages if message.taker == action]
            orders[rank].append(action)
            orders[rank] += [message for message in messages if message.source == action]
    assert come_through(orders) == comes_through
