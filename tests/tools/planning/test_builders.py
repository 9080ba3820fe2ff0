"""Models by name, as on the command line."""

import keras
import pytest

from tfdist.tools.planning.builders import arguments_of, named_builder


def make(units=3):
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])


def test_a_function_of_a_module():
    assert named_builder(f"{__name__}:make") is make
    assert named_builder(f"{__name__}.make", {"units": 5})().count_params() == 15


@pytest.mark.exhaustive
def test_a_backbone_of_keras_hub():
    sizes = {"vocabulary_size": 29, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 24}
    build = named_builder(
        "keras_hub.models.Llama3Backbone", arguments_of('{"num_query_heads": 4, "num_key_value_heads": 2}') | sizes
    )
    # The table and the head, two blocks of q, k, v, o, three matrices and two norms, and the last norm.
    assert build().count_params() == 2 * 29 * 16 + 2 * (16 * 16 * 3 + 3 * 16 * 24 + 2 * 16) + 16


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:build", "a module that can be imported .No module named 'no_such_module'"),
        ("build", "must name a function or class that makes a model. Received: model='build'"),
        ("keras:build_it", "must name a function or class that makes a model"),
        ("keras.version.x", "a module that can be imported"),
    ],
)
def test_names_of_nothing(name, message):
    with pytest.raises(ValueError, match=message):
        named_builder(name)


@pytest.mark.parametrize("text", ["{", "[1]", "3", ""])
def test_arguments_that_are_no_object(text):
    with pytest.raises(ValueError, match="`arguments` must be a JSON object"):
        arguments_of(text)
