"""What may be given as `stages`."""

import re

import keras
import pytest
from keras import layers

from tfdist.extensions.pipeline.stages.split_points import resolve_split_points
from tfdist.extensions.pipeline.stages.stage import nodes_in_order


@pytest.fixture(scope="module")
def module():
    """x ─ block_0 ─ block_1 ─ + ─ block_2 ─ again ─ block_3 ─ again; the operation + has no place among the layers."""
    x = inputs = keras.Input((6,))
    again = layers.Dense(6, name="again")
    x = layers.Dense(6, name="block_0")(x)
    x = layers.Dense(6, name="block_1")(x) + x
    x = again(layers.Dense(6, name="block_2")(x))
    return keras.Model(inputs, again(layers.Dense(6, name="block_3")(x)), name="m")


def names_at(module, split_points):
    return [nodes_in_order(module)[cut].operation.name for cut in split_points]


def test_names_and_places(module):
    layer_names = [layer.name for layer in module.layers[1:]]
    stages = ["block_1", "again", "block_3"]
    split_points = resolve_split_points(module, stages, 4)
    assert names_at(module, split_points) == stages
    assert resolve_split_points(module, [layer_names.index(name) for name in stages], 4) == split_points
    assert resolve_split_points(module, (stages[0], layer_names.index(stages[1]), stages[2]), 4) == split_points
    assert resolve_split_points(module, names_at(module, [2, 3]), 3) == [2, 3]  # 2 is the operation
    assert resolve_split_points(module, ["again"], 2) == [4]  # before its first call


def test_balanced(module):
    assert names_at(module, resolve_split_points(module, None, 2)) == ["again"]
    assert names_at(module, resolve_split_points(module, None, 7)) == names_at(module, range(1, 7))


def test_by_flops_and_not_by_bytes():
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(1000, 4, name="embed")(inputs)
    for index in range(4):
        x = layers.Dense(4, name=f"dense_{index}")(x)
    module = keras.Model(inputs, x)
    assert names_at(module, resolve_split_points(module, None, 2)) == ["dense_2"]


def test_bytes_decide_between_cuts_of_equal_flops():
    """Cut anywhere between the Dense layers, both stages have the same FLOPs."""
    inputs = keras.Input((4, 4))
    x = layers.Reshape((16,), name="flat")(layers.Dense(4, name="dense_0")(inputs))
    module = keras.Model(inputs, layers.Dense(4, name="dense_1")(layers.Reshape((4, 4), name="square")(x)))
    assert names_at(module, resolve_split_points(module, None, 2)) == ["square"]


def test_one_stage_is_not_cut(module):
    assert resolve_split_points(module, None, 1) == resolve_split_points(module, ["block_1", "block_2"], 1) == []
    with pytest.raises(ValueError, match="none of the name 'blok_2'"):
        resolve_split_points(module, ["block_1", "blok_2"], 1)


@pytest.mark.parametrize("stages", [None, ["block_1"]])
def test_more_stages_than_layers(module, stages):
    words = "More stages than layers: 8 stages cannot be made of the 7 layers and operations of 'm', none empty. Take a smaller"
    with pytest.raises(ValueError, match=re.escape(words)):
        resolve_split_points(module, stages, 8)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ("block_1", "`stages` must be a sequence of names or places of layers, or None. Received: stages='block_1'"),
        (2, "`stages` must be a sequence of names or places of layers, or None. Received: stages=2"),
        (["block_1"], "the first layer of every stage but stage 0, 2 for 3 stages, but has 1. Received: stages=['block_1']"),
        (["block_1", "blok_2"], "layers of 'm', but it has none of the name 'blok_2'. Some that it has: 'block_2', 'block_3'"),
        (["block_1", "xyz"], "none of the name 'xyz'. Some that it has: 'block_0', 'block_1', "),
        ([1, 5], "A place in `stages` must be from 1 to 4: 5 layers. Received: place=5"),
        ([-1, 3], "A place in `stages` must be from 1 to 4: 5 layers. Received: place=-1"),
        (["block_0", "block_1"], "`stages` must leave stage 0 a layer, but 'block_0' is the first"),
        ([0, 1], "`stages` must leave stage 0 a layer, but 0 is the first"),
        (["block_2", "block_1"], "'block_1' does not come after 'block_2': stage 1 would be empty."),
        (["block_2", "block_2"], "'block_2' does not come after 'block_2': stage 1 would be empty."),
    ],
)
def test_errors(module, stages, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        resolve_split_points(module, stages, 3)
