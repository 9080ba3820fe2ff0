"""What is exported of pipelines: TensorFlow without tfdist serves it, with the same outputs."""

import keras
import pytest
from grids import exhaustive
from training import strategy_for

import tfdist
from tests.devices import of_cpus
from tests.programs.saving.test_exports import assert_tensorflow_serves, trained

pytestmark = pytest.mark.timeout(300)


def pipelined(strategy):
    with strategy.scope():
        inside = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)])
        model = tfdist.PipelineModel(inside, num_microbatches=2)
    return trained(model, strategy)


MODELS = {
    "pipeline-0": lambda: pipelined(strategy_for(2, 0, pipeline_parallel_size=2)),
    "pipeline-1": lambda: pipelined(strategy_for(4, 1, pipeline_parallel_size=2)),
}
NOT_OF_PIPELINES = ("saved_model", "archive", "converter.tflite")


@of_cpus("it starts a process")
@pytest.mark.parametrize(("names", "but"), [(("pipeline-0",), ("export",)), exhaustive(tuple(MODELS), ())])
def test_tensorflow_without_tfdist_serves_it(names, but, tmp_path):
    assert_tensorflow_serves({name: MODELS[name] for name in names}, (*but, *NOT_OF_PIPELINES), tmp_path)
