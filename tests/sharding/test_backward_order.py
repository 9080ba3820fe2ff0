"""The order of the backward pass: no cycle, no more gathered than allowed, and the documented examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.sharding.backward_order import Reduction, Regather, Step, order_backward

PREFETCH = st.integers(0, 4)


@st.composite
def any_backward(draw):
    """Units whose uses overlap in any way, and reductions that become ready anywhere."""
    units = draw(st.integers(0, 8))
    regathers = [
        Regather(unit, tuple(sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=4)))), draw(st.booleans()))
        for unit in range(units)
    ]
    reductions = [Reduction(unit, draw(st.integers(0, 40))) for unit in range(units)]
    return draw(st.permutations(regathers)), draw(st.permutations(reductions))


@st.composite
def layered_backward(draw):
    """What a stack of layers gives: unit k - 1 is used after unit k; only the one gathered last may have been kept."""
    count, now, keep = draw(st.integers(1, 8)), 0, draw(st.booleans())
    regathers, reductions = [], []
    for unit in reversed(range(count)):
        uses = []
        for _ in range(draw(st.integers(1, 3))):
            now += draw(st.integers(1, 3))
            uses.append(now)
        regathers.append(Regather(unit, tuple(uses), is_kept=keep and unit == count - 1))
        reductions.append(Reduction(unit, now + draw(st.integers(0, 6))))
    return draw(st.permutations(regathers)), draw(st.permutations(reductions))


@given(any_backward(), PREFETCH)
def test_everything_is_there_once(backward, prefetch):
    regathers, reductions = backward
    actions = [step.action for step in order_backward(regathers, reductions, prefetch)]
    expected = [regather for regather in regathers if not regather.is_kept] + list(reductions)
    assert sorted(actions, key=repr) == sorted(expected, key=repr)


@given(any_backward(), PREFETCH)
def test_no_dependency_is_contradicted(backward, prefetch):
    """Even if every operation needs all those before it, the chain can run: a regather before its uses, and so on."""
    steps = order_backward(*backward, prefetch)
    done = -1  # the last operation that must have run before the chain can go on
    for step in steps:
        if isinstance(step.action, Reduction):
            done = max(done, step.action.ready)
        else:
            done = max([done, *(step.gate or ())])
            assert done < min(step.action.uses), f"{step} would wait for itself"


@given(any_backward(), PREFETCH)
def test_regathers_stay_in_order_of_use(backward, prefetch):
    firsts = [min(s.action.uses) for s in order_backward(*backward, prefetch) if isinstance(s.action, Regather)]
    assert firsts == sorted(firsts)


@given(layered_backward(), PREFETCH)
def test_at_most_prefetch_and_one_are_gathered(backward, prefetch):
    """Operations run in order, collectives as early as the chain, the gates and the gradients let them."""
    regathers, reductions = backward
    steps = order_backward(regathers, reductions, prefetch)
    gathered = {regather for regather in regathers if regather.is_kept}
    most, chain = len(gathered), list(steps)
    for now in range(-1, 1 + max([use for r in regathers for use in r.uses] + [r.ready for r in reductions])):
        # Operation `now` has run; a unit is freed with its last use.
        gathered = {regather for regather in gathered if max(regather.uses) > now}
        while chain and _may_run(chain[0], now):
            step = chain.pop(0)
            if isinstance(step.action, Regather):
                gathered.add(step.action)
                most = max(most, len(gathered))
        for regather in regathers:
            assert now + 1 not in regather.uses or regather in gathered, "used before it was gathered"
    assert not chain
    assert most <= prefetch + 1
    assert most == min(prefetch + 1, len(regathers)), "less is gathered ahead than asked for"


def _may_run(step: Step, now: int) -> bool:
    if isinstance(step.action, Reduction):
        return step.action.ready <= now
    return max(step.gate or (-1,)) <= now


# Four layers: unit k is read by operation 10 (3 - k), and its gradient is ready one operation later.
LAYERS = [Regather(unit, (10 * (3 - unit),), is_kept=unit == 3) for unit in range(4)]
REDUCTIONS = [Reduction(unit, 10 * (3 - unit) + 1) for unit in range(4)]
EXAMPLES = {
    0: "rs3 g2 rs2 g1 rs1 g0 rs0",
    1: "g2 rs3 g1 rs2 g0 rs1 rs0",
    2: "g2 g1 rs3 g0 rs2 rs1 rs0",
    9: "g2 g1 g0 rs3 rs2 rs1 rs0",
}
GATES = {
    0: {2: (0,), 1: (10,), 0: (20,)},
    1: {2: None, 1: (0,), 0: (10,)},
    2: {2: None, 1: None, 0: (0,)},
    9: {2: None, 1: None, 0: None},
}


@pytest.mark.parametrize("prefetch", EXAMPLES)
def test_documented_order(prefetch):
    steps = order_backward(LAYERS, REDUCTIONS, prefetch)
    text = [f"{'g' if isinstance(step.action, Regather) else 'rs'}{step.action.unit}" for step in steps]
    assert " ".join(text) == EXAMPLES[prefetch]
    gates = {step.action.unit: step.gate for step in steps if isinstance(step.action, Regather)}
    assert gates == GATES[prefetch]


def test_nothing_kept():
    regathers = [Regather(regather.unit, regather.uses) for regather in LAYERS]
    steps = order_backward(regathers, REDUCTIONS, 1)
    assert [step.action.unit for step in steps] == [3, 2, 3, 1, 2, 0, 1, 0]
    assert [step.gate for step in steps if isinstance(step.action, Regather)] == [None, None, (0,), (10,)]


def test_a_use_at_or_after_the_place_of_issue_is_not_waited_for():
    """Unit 0 is read at 0 and 30, unit 1 at 10: unit 1 waits for the first read only, or it might never start."""
    steps = order_backward([Regather(0, (0, 30)), Regather(1, (10,))], [], 0)
    assert [(step.action.unit, step.gate) for step in steps] == [(0, None), (1, (0,))]


def test_nothing_to_do():
    assert order_backward([], [], 1) == []
