"""KerasHub's tasks saved as presets, and loaded in a scope, of another stage, and outside of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import strategy_for

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300)]

VOCABULARY = 40
rng = np.random.default_rng(0)
IDS = rng.integers(1, VOCABULARY, (4, 6)).astype("int32")
INPUTS = {"token_ids": IDS, "padding_mask": np.ones_like(IDS)}


def trained(strategy, models):
    keras.utils.set_random_seed(1)
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32, "max_sequence_length": 8}
    with strategy.scope():
        backbone = models.GPT2Backbone(vocabulary_size=VOCABULARY, **sizes)
        task = models.GPT2CausalLM(backbone=backbone, preprocessor=None)
        task.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    task.fit(INPUTS, rng.integers(0, VOCABULARY, IDS.shape), batch_size=4, verbose=0)
    return task


@pytest.mark.parametrize(
    ("zero_stage", "others"), [(3, (None, 0)), exhaustive(3, (None, 0, 3)), exhaustive(0, (None, 0, 3))], ids=str
)
def test_a_preset_is_loaded_anywhere(zero_stage, others, tmp_path):
    """`others`: the stages of the strategies in whose scopes it is loaded; None: in none."""
    models = pytest.importorskip("keras_hub").models
    strategy = strategy_for(2, zero_stage)
    task = trained(strategy, models)
    expected = task.predict(INPUTS, verbose=0)
    task.save_to_preset(str(tmp_path / "preset"))
    for stage in others:
        place = tf.distribute.get_strategy() if stage is None else strategy_for(2, stage)
        with place.scope():
            loaded = models.CausalLM.from_preset(str(tmp_path / "preset"), preprocessor=None)
            backbone = models.Backbone.from_preset(str(tmp_path / "preset"))
        np.testing.assert_allclose(loaded.predict(INPUTS, verbose=0), expected, rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(backbone.weights, task.backbone.weights, strict=True):
            np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
