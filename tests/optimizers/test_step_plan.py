"""The list of a step: the documented orders, and that every gradient passes every station once, whatever the settings."""

import dataclasses
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.optimizers import plan as plan_module
from tfdist.optimizers.plan import (
    Broadcast,
    Clip,
    Gather,
    Gradient,
    HoldBack,
    Reduce,
    Settings,
    Update,
    UpdateWhole,
    buckets_of,
    plan_reduction,
    plan_step,
)
from tfdist.sharding import placements_of

ELEMENTS = 100


def gradients(count, zero_stage=2, **facts):
    """Returns `count` equal gradients, each a bucket of its own with `settings`."""
    stepped = ELEMENTS // 2 if zero_stage else ELEMENTS
    return [Gradient(ELEMENTS, stepped, **{"is_sharded": zero_stage == 3, "is_reduced": zero_stage == 3, **facts})] * count


def settings(zero_stage=2, **changes):
    return Settings(placements_of(zero_stage), bucket_bytes=4 * ELEMENTS, **changes)


def text(count, zero_stage=2, facts=None, **changes):
    return str(plan_step(gradients(count, zero_stage, **(facts or {})), settings(zero_stage, **changes)))


def test_plans_know_no_tensorflow():
    assert "import tensorflow" not in inspect.getsource(plan_module)


def test_stage_0_reduces_all_and_updates_in_place():
    assert text(2, 0) == "reduce 0 (1) · reduce 1 (0) · update (1 0)"


def test_stage_1_reduces_all_first():
    assert text(2, 1) == "reduce 0 (1) · reduce 1 (0) · update (1) · gather 0 (1) · update (0) · gather 1 (0)"


def test_stage_2_gathers_a_bucket_when_the_next_two_are_reduced():
    assert text(4, 2) == (
        "reduce 0 (3) · reduce 1 (2) · reduce 2 (1) · update (3) · gather 0 (3) · reduce 3 (0) · "
        "update (2) · gather 1 (2) · update (1) · gather 2 (1) · update (0) · gather 3 (0)"
    )


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_where_gathers_pass_behind_backward_one_more_reduction_stands_before_each(zero_stage):
    assert text(3, zero_stage, gathers_soon=True) == (
        "reduce 0 (2) · reduce 1 (1) · update (2) · gather 0 (2) · reduce 2 (0) · "
        "update (1) · gather 1 (1) · update (0) · gather 2 (0)"
    )
    clipped = text(3, zero_stage, gathers_soon=True, clipping="global_clipnorm")
    assert clipped.startswith("reduce 0 (2) · reduce 1 (1) · reduce 2 (0) · clip")


def test_stage_3_steps_on_what_the_tape_has_reduced():
    assert text(3, 3) == "update (0 1 2)"


def test_a_gradient_of_stage_3_that_the_program_has_made_travels_alone():
    own = [dataclasses.replace(gradient, is_reduced=place != 1) for place, gradient in enumerate(gradients(3, 3))]
    assert str(plan_step(own, settings(3))) == "reduce (1) · update (0 1 2)"


def test_waits_of_gradients_in_flight():
    """With two in flight a gradient waits for the reduction two before it; with one, for the gather between, too."""
    with_two = text(4, 2, in_flight=2)
    assert with_two.startswith("reduce 0 (3) · hold back 2 · reduce 1 (2) · hold back 3 · reduce 2 (1) · update (3) · gather 0")
    assert text(3, 2, in_flight=1) == (
        "reduce 0 (2) · hold back 1 · reduce 1 (1) · hold back 2 · update (2) · gather 0 (2) · hold back 2 · reduce 2 (0) · "
        "update (1) · gather 1 (1) · update (0) · gather 2 (0)"
    )


@pytest.mark.parametrize("kind", ["clipnorm", "global_clipnorm"])
def test_a_norm_waits_for_all(kind):
    assert text(2, 2, clipping=kind) == (
        f"reduce 0 (1) · reduce 1 (0) · clip {kind} (0 1) · update (1) · gather 0 (1) · update (0) · gather 1 (0)"
    )
    assert str(plan_step([], settings(2, clipping=kind))) == f"clip {kind} ()", "a rank without weights takes part in the norm"


def test_values_are_clipped_and_unscaled_one_by_one():
    assert text(2, 2, clipping="clipvalue", is_unscaled=True) == (
        "reduce 0 (1) · unscale (1) · reduce 1 (0) · unscale (0) · "
        "clip clipvalue (1) · update (1) · gather 0 (1) · clip clipvalue (0) · update (0) · gather 1 (0)"
    )


def test_accumulating_shards_and_partial_sums():
    assert text(2, 2, accumulation_steps=3, is_unscaled=True) == (
        "reduce 0 (1) · unscale (1) · reduce 1 (0) · unscale (0) · "
        "accumulate, in every 3. call [update (1) · gather 0 (1) · update (0) · gather 1 (0)]"
    )
    assert text(2, 0, accumulation_steps=3, is_unscaled=True, accumulates_partial_sums=True) == (
        "unscale (0 1) · accumulate, in every 3. call [reduce 0 (1) · reduce 1 (0) · update (1 0)]"
    )


def test_what_follows_in_every_call():
    assert text(1, 0, afterwards=("average", "constrain")) == "reduce 0 (0) · update (0) · then average · then constrain"
    assert (
        text(1, 0, accumulation_steps=2, afterwards=("average",))
        == "reduce 0 (0) · accumulate, in every 2. call [update (0)] · then average"
    )


def test_owners_step_on_whole_parameters():
    owned = [dataclasses.replace(gradients(1, global_elements=ELEMENTS // 3)[0], owner=owner) for owner in (0, 1, 0)]
    assert str(plan_step(owned, settings(2))) == (
        "reduce 0 (2) · reduce 1 (1) · reduce 2 (0) · "
        "complete 0 (0 1 2) · update whole owner 0 (0 2) · broadcast 0 owner 0 (0 2) · "
        "update whole owner 1 (1) · broadcast 0 owner 1 (1)"
    )


def test_reduced_gradients_are_not_reduced_again():
    assert text(2, 2, facts={"is_reduced": True}) == "update (1) · gather 0 (1) · update (0) · gather 1 (0)"
    some = [dataclasses.replace(gradient, is_reduced=place == 0) for place, gradient in enumerate(gradients(2))]
    assert str(plan_reduction(some, settings(2))[0]) == "reduce 0 (1)"


def test_what_is_updated_together(monkeypatch):
    monkeypatch.setattr(plan_module, "LARGE_ELEMENTS", 20)
    monkeypatch.setattr(plan_module, "JOINT_ELEMENTS", 20)
    monkeypatch.setattr(plan_module, "COMPILED_ELEMENTS", 30)
    monkeypatch.setattr(plan_module, "COMPILER_PAYS_IN_ONE", 30)
    sizes = [20, 9, 9, 9, 30]
    found = [Gradient(size, size, is_sharded=True, is_reduced=True) for size in sizes]
    assert str(plan_step(found, settings(3))) == "update (0) shared (4) shared (1 2) (3)"
    assert str(plan_step(found, settings(3, may_compile=True))) == "update (0) shared (4) compiled (1 2) (3)"
    assert str(plan_step(found, settings(3, is_shareable=False))) == "update (0) (1) (2) (3) (4)"
    found[2] = dataclasses.replace(found[2], kind=("decays",))
    assert str(plan_step(found, settings(3))) == "update (0) shared (4) shared (1 3) (2)"


@st.composite
def any_step(draw):
    zero_stage = draw(st.integers(0, 3))
    owned, reduced = draw(st.booleans()), draw(st.booleans())
    drawn = [
        Gradient(
            elements=draw(st.integers(0, 300)),
            stepped=draw(st.integers(0, 300)),
            dtype=draw(st.sampled_from(["float32", "float16"])),
            kind=(draw(st.booleans()),),
            is_sharded=zero_stage == 3,
            is_reduced=reduced or zero_stage == 3,
            owner=draw(st.integers(0, 2)) if owned else None,
            global_elements=draw(st.integers(0, 600)),
        )
        for _ in range(draw(st.integers(0, 9)))
    ]
    accumulation_steps = draw(st.sampled_from([0, 3]))
    return drawn, settings(
        zero_stage,
        in_flight=draw(st.sampled_from([1, 2])) if zero_stage == 2 and not reduced else None,
        is_unscaled=draw(st.booleans()),
        clipping=draw(st.sampled_from([None, "clipnorm", "global_clipnorm", "clipvalue"])),
        accumulation_steps=accumulation_steps,
        accumulates_partial_sums=bool(accumulation_steps) and zero_stage < 2,
        is_shareable=draw(st.booleans()),
    )


@given(any_step())
def test_every_gradient_passes_every_station_once_and_in_order(drawn):
    facts, chosen = drawn
    plan = plan_step(facts, chosen)
    actions = [*plan.first, *plan.step]
    stations: dict[int, list[str]] = {place: [] for place in range(len(facts))}
    for action in actions:
        names = {Clip: "clip", UpdateWhole: "update", Broadcast: "publish", Gather: "publish"}
        name = names.get(type(action), type(action).__name__.lower())
        for place in getattr(action, "members", ()):
            stations[place].append(name)
        if isinstance(action, Update):
            for vector in action.vectors:
                assert len({(facts[place].kind, facts[place].dtype) for place in vector.members}) == 1
    for place, passed in stations.items():
        fact = facts[place]
        publishes = fact.owner is not None or chosen.placements.optimizer_state != chosen.placements.parameter
        expected = ["reduce"] * (not fact.is_reduced) + ["unscale"] * chosen.is_unscaled + ["clip"] * (bool(chosen.clipping))
        if chosen.accumulates_partial_sums and chosen.is_unscaled and not fact.is_reduced:
            expected[:2] = expected[1::-1]
        expected += ["complete"] * (fact.owner is not None) + ["update"] + ["publish"] * publishes
        assert passed == expected


@given(any_step())
def test_gradients_that_wait_are_not_reduced_before(drawn):
    """A bucket is held back before it is reduced, and after the reductions before it, so that nothing waits for itself."""
    facts, chosen = drawn
    plan = plan_step(facts, chosen)
    reduced: list[int] = []
    held: set[int] = set()
    for action in (*plan.first, *plan.step):
        if isinstance(action, Reduce):
            assert action.bucket == len(reduced)
            assert chosen.in_flight is None or action.bucket < chosen.in_flight or action.bucket in held
            reduced.append(action.bucket)
        if isinstance(action, HoldBack):
            assert action.bucket not in reduced
            held.add(action.bucket)
    if not any(fact.is_reduced for fact in facts):
        assert len(reduced) == len(buckets_of(facts, chosen.bucket_bytes))
