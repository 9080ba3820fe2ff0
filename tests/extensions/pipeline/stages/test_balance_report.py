"""The table of a model's stages."""

import keras
from keras import layers

from tfdist.extensions.pipeline import Schedule1F1B, ScheduleInterleaved1F1B
from tfdist.extensions.pipeline.stages.balance_report import report
from tfdist.extensions.pipeline.stages.costs import node_costs
from tfdist.extensions.pipeline.stages.staged_model import StagedModel


def made(schedule, split_points, num_layers):
    x = inputs = keras.Input((10,))
    for index in range(num_layers):
        x = layers.Dense(10, use_bias=False, name=f"dense_{index}")(x)
    module = keras.Model(inputs, x)
    return report(StagedModel(module, split_points, schedule), node_costs(module))


def test_by_hand():
    assert made(Schedule1F1B(2, 2), [1], 4) == (
        "stage  rank  layers              FLOPs  share  weights  to the next stage\n"
        "-------------------------------------------------------------------------\n"
        "    0     0  dense_0              200   25.0%    400 B               40 B\n"
        "    1     1  dense_1 .. dense_3   600   75.0%  1.20 kB                  -\n"
        "-------------------------------------------------------------------------\n"
        "Largest stage / mean: 1.50. FLOPs of a forward pass and bytes to the next stage are those of one example."
    )


def test_ranks_of_several_stages():
    lines = made(ScheduleInterleaved1F1B(4, 2, 2), [1, 2, 3], 4).splitlines()[2:6]
    assert [line.split()[:3] for line in lines] == [[str(i), str(i % 2), f"dense_{i}"] for i in range(4)]


def test_what_passes_by_and_what_is_shared_counts_on_every_stage():
    inputs, dense = keras.Input((10,)), layers.Dense(10, use_bias=False)
    first = dense(inputs)
    module = keras.Model(inputs, dense(keras.ops.tanh(first)) + first)
    lines = report(StagedModel(module, [1, 2], Schedule1F1B(3, 2)), node_costs(module)).splitlines()[2:5]
    assert [line.partition("%")[2].split() for line in lines] == [
        ["400", "B", "40", "B"],
        ["0", "B", "80", "B"],  # what tanh returns, and its input for the sum
        ["400", "B", "-"],
    ]


def test_a_model_that_computes_nothing():
    x = inputs = keras.Input((10,))
    for _ in range(2):
        x = layers.Reshape((10,))(x)
    module = keras.Model(inputs, x)
    assert "Largest stage / mean: 0.00" in report(StagedModel(module, [1], Schedule1F1B(2, 2)), node_costs(module))
