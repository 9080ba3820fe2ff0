"""The ZeRO table against its formulas."""

import pytest

from tfdist.sharding import ZERO_STAGES, Partial, Replicate, Shard, ZeroPlacements, placements_of

FORMULAS = {
    0: lambda n: 16,
    1: lambda n: 8 + 8 / n,
    2: lambda n: 4 + 12 / n,
    3: lambda n: 16 / n,
}


@pytest.mark.parametrize("zero_stage", FORMULAS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 64, 1000])
def test_bytes_per_parameter_of_adam_in_single_precision(zero_stage, n):
    assert placements_of(zero_stage).bytes_per_parameter(n) == pytest.approx(FORMULAS[zero_stage](n), rel=1e-12)


def test_each_stage_shards_one_thing_more():
    sharded = [
        [isinstance(getattr(ZERO_STAGES[stage], kind), Shard) for kind in ("optimizer_state", "gradient", "parameter")]
        for stage in range(4)
    ]
    assert sharded == [[False, False, False], [True, False, False], [True, True, False], [True, True, True]]
    # Whole in stage 0; a summand of its own on each rank until the step in stage 1.
    assert ZERO_STAGES[0].gradient == Replicate()
    assert ZERO_STAGES[1].gradient == Partial()


def test_fraction():
    placements = ZeroPlacements(parameter=Replicate(), gradient=Partial(), optimizer_state=Shard())
    assert [placements.fraction(kind, 4) for kind in ("parameter", "gradient", "optimizer_state")] == [1, 1, 0.25]


@pytest.mark.parametrize("zero_stage", [-1, 4, True, False, None, "3", 2.5])
def test_unknown_stage(zero_stage):
    with pytest.raises(ValueError, match="`zero_stage` must be 0 .*, 1 .*, 2 .* or 3 ") as error:
        placements_of(zero_stage)
    assert f"Received: zero_stage={zero_stage!r}." in str(error.value)
