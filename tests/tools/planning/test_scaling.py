"""Scaling laws, against the numbers of the papers."""

import math

import pytest

from tfdist.tools.planning import scaling


def test_chinchilla_itself():
    """70 billion parameters on 1.4 trillion tokens: 5.9e23 operations (Hoffmann et al. 2022, table A3: 5.76e23 for 67 B)."""
    assert scaling.optimal_tokens(70e9) == 1.4e12
    assert math.isclose(scaling.training(70e9, tokens=1.4e12).flops, 5.88e23)
    assert math.isclose(scaling.optimal_parameters(5.88e23), 70e9)


def test_gpt3():
    """Brown et al. 2020, table D.1: 3.14e23 operations for 174.6 billion parameters and 300 billion tokens."""
    assert math.isclose(scaling.training(174.6e9, tokens=300e9).flops, 3.14e23, rel_tol=2e-3)


def test_what_is_optimal_uses_all_operations():
    for flops in (1e18, 2e23, 3.3e25):
        best = scaling.optimal_parameters(flops)
        assert math.isclose(scaling.training(best, tokens=scaling.optimal_tokens(best)).flops, flops)


def test_tokens_and_operations_are_inverse():
    by_tokens = scaling.training(8e9, tokens=15e12, attention_flops_per_token=1e9, flops_per_second=1e18)
    assert by_tokens.flops == (6 * 8e9 + 1e9) * 15e12
    assert math.isclose(by_tokens.days, by_tokens.flops / 1e18 / 86400)
    by_flops = scaling.training(8e9, flops=by_tokens.flops, attention_flops_per_token=1e9)
    assert math.isclose(by_flops.tokens, 15e12)
    assert by_flops.days is None
    assert scaling.training(8e9).tokens == 160e9


def test_what_it_prints():
    assert str(scaling.training(70e9, tokens=1e12, flops_per_second=1e17)).splitlines() == [
        "70 B parameters, 1 T tokens: 4.2e+23 FLOPs, 48.6 days",
        "14.3 tokens for each parameter; 20 are optimal (Chinchilla): 1.4 T",
        "optimal for 4.2e+23 FLOPs: 59.2 B parameters, 1.18 T tokens",
    ]

    assert str(scaling.training(1e6, tokens=1e9, flops_per_second=1e12)).splitlines()[0].endswith("6e+15 FLOPs, 1.7 hours")


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "1e9"])
def test_numbers_that_are_none(value):
    with pytest.raises(ValueError, match="`parameters` must be a positive number"):
        scaling.training(value, tokens=1e9)
    with pytest.raises(ValueError, match="`flops` must be a positive number"):
        scaling.optimal_parameters(value)


def test_tokens_and_operations_are_not_both_given():
    with pytest.raises(ValueError, match="`tokens` or `flops` must be None"):
        scaling.training(1e9, tokens=1e9, flops=1e18)
