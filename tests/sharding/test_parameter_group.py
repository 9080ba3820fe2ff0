"""Which neighbouring layers' parameters travel in one message."""

import pytest

from tfdist.sharding.parameter_group import gathered_together


class Layer:
    def __init__(self, compute_dtype="float32"):
        self.compute_dtype = compute_dtype


def together(sizes, group_bytes, grouped=(), dtypes=None):
    """`sizes`: of each layer the bytes of its parameters, by their names."""
    layers = [Layer(dtype) for dtype in dtypes or ["float32"] * len(sizes)]
    return gathered_together(zip(layers, sizes, strict=True), grouped, group_bytes)


@pytest.mark.parametrize(
    ("group_bytes", "expected"),
    [(0, ["a", "b"]), (7, ["a", "b"]), (11, ["a", "b"]), (12, ["a", "b", "c"]), (16, ["a", "b", "c"]), (17, list("abcd"))],
)
def test_layers_are_added_while_they_fit(group_bytes, expected):
    assert together([{"a": 5, "b": 3}, {"c": 4}, {"d": 5}], group_bytes) == expected


def test_the_first_layer_is_gathered_whatever_its_size():
    assert together([{"a": 100}, {"b": 1}], 10) == ["a"]


def test_a_layer_after_a_large_one_is_not_reached():
    assert together([{"a": 1}, {"b": 100}, {"c": 1}], 10) == ["a"]


def test_layers_of_another_dtype_end_the_group():
    assert together([{"a": 1}, {"b": 1}, {"c": 1}], 10, dtypes=["float32", "float16", "float32"]) == ["a"]


def test_what_has_a_group_is_left_out():
    assert together([{"a": 1, "b": 1}, {"c": 1, "a": 1}], 10, grouped={"b"}) == ["a", "c"]
    assert together([{"a": 1}, {"b": 1}, {"c": 1}], 10, grouped={"b"}) == ["a"], "a layer that adds nothing ends the group"


def test_a_shared_parameter_is_gathered_once():
    assert together([{"a": 1, "b": 1}, {"b": 1, "c": 1}], 10) == ["a", "b", "c"]
