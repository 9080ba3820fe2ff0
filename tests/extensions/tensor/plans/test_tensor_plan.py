"""Patterns and roles: what matches what, and what is refused."""

import keras
import pytest
from keras import layers
from plan_models import example_gpt

from tfdist.extensions.tensor.plans import TensorPlan


def built(layer, features=8):
    layer.build((None, features))
    return layer


def test_the_first_pattern_that_matches_decides():
    plan = TensorPlan({"mlp_in$": "column", "mlp": "row", ".*": "replicate"})
    roles = [plan.role_of(built(layers.Dense(4, name=name))) for name in ("mlp_in", "mlp_in_2", "mlp_out", "head")]
    assert roles == ["column", "row", "row", "replicate"]
    assert list(plan) == ["mlp_in$", "mlp", ".*"]


def test_a_layer_that_nothing_matches_has_no_role():
    assert TensorPlan({"mlp": "column"}).role_of(built(layers.Dense(4, name="head"))) is None


def test_patterns_are_searched_and_paths_match_exactly():
    dense = built(layers.Dense(4, name="dense_1"))
    for pattern in ("dense_1", "^dense_1$", "ense", "dense_1/kernel", "bias$"):
        assert TensorPlan({pattern: "row"}).role_of(dense) == "row", pattern
    assert TensorPlan({"^ense": "row"}).role_of(dense) is None
    odd = built(layers.Dense(4, name="a(b)"))
    assert TensorPlan({"a(b)": "row"}).role_of(odd) == "row"  # the path itself, which as an expression is "ab"


def test_the_variables_of_a_block_are_not_its_own():
    block = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="inner")], name="block")
    plan = TensorPlan({"inner": "column"})
    assert plan.role_of(block.layers[0]) == "column"
    assert plan.role_of(block) is None


def test_attention_is_cut_as_a_whole():
    attention = example_gpt().get_layer("block_0_attention")
    assert TensorPlan({"attention$": "column"}).role_of(attention) == "column"
    assert TensorPlan({"attention$": "replicate", "kernel": "column"}).role_of(attention) == "replicate"
    for pattern in (".*attention/query/kernel", "kernel$", "query$"):
        with pytest.raises(ValueError, match=r"attention layer as a whole.*Received: pattern=.*block_0_attention\$"):
            TensorPlan({pattern: "column"}).role_of(attention)


@pytest.mark.parametrize(
    "patterns, message",
    [
        ({}, r"`plan` must map at least one pattern to a role. Received: plan=\{\}"),
        (None, "`plan` must map at least one pattern to a role. Received: plan=None"),
        (["dense"], "`plan` must map at least one pattern"),
        ({"dense": "colum"}, "one of the roles .*Received: pattern='dense', role='colum'"),
        ({"dense": None}, "one of the roles"),
        ({"dense(": "column"}, r"regular expressions. Received: pattern='dense\('. It does not compile"),
        ({3: "column"}, "patterns that are strings. Received: pattern=3"),
    ],
)
def test_bad_plans_are_refused(patterns, message):
    with pytest.raises(ValueError, match=message):
        TensorPlan(patterns)


def test_a_plan_is_a_mapping():
    patterns = {"a": "column", "b": "row"}
    plan = TensorPlan(patterns)
    assert plan == patterns and dict(plan) == plan.as_dict() == patterns
    assert TensorPlan(plan) == plan
    assert repr(plan) == "TensorPlan({'a': 'column', 'b': 'row'})"
    patterns["c"] = "row"
    assert "c" not in plan
    plan.as_dict()["c"] = "row"
    assert "c" not in plan
