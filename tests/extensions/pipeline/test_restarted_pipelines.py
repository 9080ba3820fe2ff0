"""A `fit` of a pipeline goes on from the middle of an epoch and of an accumulation as if it had never stopped, bit by bit."""

import keras
import pytest
from grids import exhaustive

import tfdist
from tests.extensions.resuming import restarted_fits
from tests.extensions.resuming.restarted_fits import OPTIMIZERS, assert_no_differences
from tests.training import on_two_data_ranks

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300)]


class Blocks(keras.Model):
    """A subclassed model, of blocks, with a seed generator behind them."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(6)
        self.blocks = [keras.layers.Dense(6, activation="relu") for _ in range(3)]
        self.dropout, self.head = keras.layers.Dropout(0.2), keras.layers.Dense(3)

    def call(self, x, training=None):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x, training=training))


MODELS = {
    "pipeline": lambda: tfdist.PipelineModel(restarted_fits.layers(), num_microbatches=2),
    "blocks": lambda: tfdist.PipelineModel(Blocks(), num_microbatches=2, blocks="blocks"),
}
SETTINGS = {
    "pipeline": [{"zero_stage": 1, "pipeline_parallel_size": 2}, {"zero_stage": 3, "pipeline_parallel_size": 2}],
    "blocks": [{"zero_stage": 0, "pipeline_parallel_size": 2}, {"zero_stage": 3, "pipeline_parallel_size": 2}],
}
CASES = [
    (model, optimizer, settings)
    for model in SETTINGS
    for optimizer in OPTIMIZERS
    for settings in SETTINGS[model]
    if optimizer != "several"  # Keras's wants all gradients of the model at once
    # Keras's Adafactor makes NaN of a gradient with a row and a column of zeros, as one row after BatchNormalization has.
    and not (optimizer == "adafactor" and model == "pipeline")
]
JOBS = [
    (model, optimizer, settings)
    for model, optimizer in [("pipeline", "scaled"), ("blocks", "averages")]
    for settings in SETTINGS[model]
]


def restarted_together(folder, cases):
    return restarted_fits.restarted_together(folder, cases, MODELS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "optimizer", "settings"), CASES, ids=str)
def test_models_and_optimizers(model, optimizer, settings, tmp_path, cpus):
    assert restarted_fits.differences(on_two_data_ranks(cpus, settings), MODELS[model], optimizer, tmp_path) == []


@pytest.mark.parametrize(
    ("devices", "cases"),
    [(1, [("pipeline", "accumulating", SETTINGS["pipeline"][0])]), *(exhaustive(2, JOBS[start::2]) for start in range(2))],
    ids=["few", "part 5", "part 6"],
)
def test_workers(devices, cases, tmp_path):
    assert_no_differences(tmp_path, "tests.extensions.pipeline.test_restarted_pipelines:restarted_together", devices, cases)
