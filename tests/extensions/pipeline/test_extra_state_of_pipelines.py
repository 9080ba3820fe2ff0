"""What a run needs beyond Keras's weights file, of pipelines: read from one model and put back into another, rank by rank."""

import functools

import keras
import pytest

import tfdist
from tests.checkpoint.test_extra_state import assert_a_model_goes_on_in_another, assert_checkpoints_have_seeds_and_optimizers
from tests.training import on_two_data_ranks

pytestmark = [pytest.mark.exhaustive, pytest.mark.as_traced, pytest.mark.timeout(300)]


def pipelined(model):
    return tfdist.PipelineModel(model, num_microbatches=2)


@pytest.mark.parametrize(
    "settings", [{"zero_stage": 3, "pipeline_parallel_size": 2}, {"zero_stage": 0, "pipeline_parallel_size": 2}], ids=str
)
def test_a_model_goes_on_in_another(settings, tmp_path, cpus):
    assert_a_model_goes_on_in_another(lambda: on_two_data_ranks(cpus, settings), tmp_path, pipelined)


@pytest.mark.parametrize("settings", [{"zero_stage": 1, "pipeline_parallel_size": 2}], ids=str)
def test_checkpoints_of_tensorflow_have_seeds_and_optimizers_in_optimizers(settings, tmp_path, cpus):
    adam = functools.partial(keras.optimizers.Adam, 0.01)
    assert_checkpoints_have_seeds_and_optimizers(lambda: on_two_data_ranks(cpus, settings), adam, tmp_path, pipelined)
