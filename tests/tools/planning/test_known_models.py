"""Known decoders have the parameters that were published, and their Keras models have those that the arithmetic says."""

import dataclasses
import math

import keras
import numpy as np
import pytest

from tfdist.tools.planning.decoder import decoder_builder
from tfdist.tools.planning.known_models import KNOWN_MODELS, known_model

SMALL = {"num_layers": 2, "width": 12, "head_size": 4, "mlp_width": 20, "vocabulary_size": 31, "max_sequence_length": 9}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # Counted in the published checkpoints; of GPT-3 and PaLM the papers say 174.6 and 540.35 billion.
        ("gpt2-xl", 1_557_611_200),
        ("gpt3-175b", 174_604_259_328),
        ("palm-540b", 540_356_474_880),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_parameters_are_the_published_ones(name, parameters):
    config = known_model(name)
    assert config.parameters == parameters
    assert math.isclose(parameters, config.published_parameters, rel_tol=0.04)


def test_every_configuration_is_in_the_table_above():
    (mark,) = test_parameters_are_the_published_ones.pytestmark
    assert [name for name, _ in mark.args[1]] == list(KNOWN_MODELS)


@pytest.mark.parametrize("name", ["gpt2-xl", "palm-540b", "llama3-8b"])
def test_the_keras_model_has_them_and_computes(name):
    config = known_model(name)
    heads = {"num_heads": 4, "num_key_value_heads": {25: 4, 1: 1, 8: 2}[config.num_key_value_heads]}
    config = dataclasses.replace(config, **SMALL, **heads)
    model = decoder_builder(config, 7)()
    assert model.count_params() == config.parameters
    assert model.get_layer("block_1").count_params() == config.block_parameters
    tokens = np.random.default_rng(0).integers(0, 31, (3, 7))
    logits = model(tokens)
    assert logits.shape == (3, 7, 31)
    changed = tokens.copy()
    changed[:, 5] = (tokens[:, 5] + 1) % 31  # causal: earlier positions do not see it
    difference = np.abs(model(changed) - logits).max(axis=(0, 2))
    assert (difference[:5] < 1e-6).all() and (difference[5:] > 1e-6).all()


def test_a_builder_compiles():
    config = dataclasses.replace(known_model("gpt2-xl"), **SMALL, num_heads=3, num_key_value_heads=3)
    model = decoder_builder(config, 5)()
    assert isinstance(model.optimizer, keras.optimizers.AdamW)
    tokens = np.random.default_rng(0).integers(0, 31, (4, 6))
    losses = [model.train_on_batch(tokens[:, :-1], tokens[:, 1:]) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert isinstance(model.loss, keras.losses.SparseCategoricalCrossentropy)


def test_wrong_names_and_lengths():
    with pytest.raises(ValueError, match="`config` must be one of gpt2-xl, gpt3-175b, .*Received: config='gpt5'"):
        known_model("gpt5")
    assert known_model("GPT2-XL") is KNOWN_MODELS["gpt2-xl"]
    with pytest.raises(ValueError, match="`sequence_length` must be at most 1024: gpt2-xl has a vector for each position"):
        decoder_builder(known_model("gpt2-xl"), 2048)
    with pytest.raises(ValueError, match="`sequence_length` must be a positive integer"):
        decoder_builder(known_model("llama3-8b"), 0)
