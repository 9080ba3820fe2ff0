"""Stage 3 in a pipeline: a stage's parameters are sharded over the data ranks, gathered once a step, or once an action."""

import collections
import functools
import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from ranks import strategy_on
from training import one_device

import tfdist
from tests.extensions.pipeline.pipeline_models import compiled, data, momentum, train
from tests.parity.comparison import assert_same_tree

pytestmark = [pytest.mark.as_traced]


@pytest.fixture
def exact(float64):
    """In float64."""


def adam():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.02, global_clipnorm=0.5, use_ema=True))


# (model, pipe, data, microbatches, schedule, stages per rank, optimizer, gathers anew, recompute)
GRID = [
    exhaustive("branches", 2, 2, 2, "1f1b", 1, momentum, False, False),
    ("plain", 2, 2, 2, "1f1b", 1, momentum, False, False),
    exhaustive("plain", 2, 2, 2, "1f1b", 1, adam, True, False),
    exhaustive("masked", 2, 2, 2, "1f1b", 1, adam, True, False),
    exhaustive("tied", 2, 2, 2, "zero_bubble", 1, momentum, False, False),
    exhaustive("tied", 2, 2, 2, "1f1b", 1, adam, True, False),
    exhaustive("recurrent", 2, 2, 2, "gpipe", 1, momentum, False, False),
    exhaustive("recurrent", 2, 2, 2, "gpipe", 1, momentum, True, False),
    exhaustive("branches", 2, 2, 2, "interleaved", 2, adam, True, False),
    exhaustive("branches", 2, 2, 3, "zero_bubble", 1, momentum, True, False),
    exhaustive("masked", 2, 2, 2, "1f1b", 1, momentum, True, True),
    exhaustive("masked", 2, 2, 2, "1f1b", 1, momentum, False, True),
    exhaustive("branches", 1, 2, 2, "1f1b", 1, adam, False, False),
    exhaustive("branches", 1, 2, 2, "1f1b", 1, momentum, True, False),
]


@pytest.mark.parametrize(
    ("name", "pipe", "data_ranks", "num_microbatches", "schedule", "stages_per_rank", "optimizer", "anew", "recompute"), GRID
)
def test_it_is_one_device(exact, name, pipe, data_ranks, num_microbatches, schedule, stages_per_rank, optimizer, anew, recompute):
    strategy = strategy_on(pipe * data_ranks, pipeline_parallel_size=pipe, zero_stage=3)
    settings = {"schedule": schedule, "stages_per_rank": stages_per_rank, "recompute": recompute}
    settings = {**settings, "num_microbatches": num_microbatches, "reshard_after_microbatch": anew}
    assert_same_tree(train(strategy, name, optimizer, **settings), train(one_device(), name, optimizer))


@pytest.mark.parametrize("anew", [exhaustive(False), True])
def test_statistics_and_random_numbers(exact, anew):
    """Layers that are no functions of their inputs: every microbatch has operations of its own."""
    settings = {"num_microbatches": 2, "stages": [3], "infers": False}
    expected = train(strategy_on(2, zero_stage=0), "noisy", **{**settings, "stages": None})
    strategy = strategy_on(4, pipeline_parallel_size=2, zero_stage=3)
    assert_same_tree(train(strategy, "noisy", reshard_after_microbatch=anew, **settings), expected)


@functools.cache
def stacked(num_microbatches, anew=False, policy=None, schedule="1f1b"):
    """Returns a strategy of 2 data x 2 pipe ranks and a model of 4 equal layers, two on each stage, after two steps."""
    strategy = strategy_on(4, pipeline_parallel_size=2, zero_stage=3)
    with strategy.scope():
        dense = [keras.layers.Dense(6, "tanh", dtype=policy, name=f"dense_{index}") for index in range(4)]
        model = tfdist.PipelineModel(
            keras.Sequential([keras.Input((6,)), *dense]),
            num_microbatches=num_microbatches,
            stages=["dense_2"],
            reshard_after_microbatch=anew,
            schedule=schedule,
        )
        model.compile("adam", "mse")
    x = np.ones((32, 6), "float32")
    model.fit(x, x, batch_size=16, verbose=0)
    return strategy, model


LAYER = 6 * 6 + 6  # elements, whole
SHARD = 6 * 6 // 2 + 6 // 2


def moved(strategy, rank):
    """Returns the elements that a rank's messages carry in a step, and their number, by kind: of the weights' and gradients'."""
    elements, count = collections.Counter(), collections.Counter()
    for record in strategy.last_plan.records[rank]:
        kind = record.label.partition("/")[0]
        elements[kind] += math.prod(record.shape)
        count[kind] += 1
    return elements, count


@pytest.mark.parametrize("num_microbatches", [2, exhaustive(4)])
@pytest.mark.parametrize("anew", [False, True])
def test_bytes(anew, num_microbatches):
    """A layer's shards are sent once a step, whatever the number of microbatches; or once for each forward and backward of one.

    The first layer of a model needs no weights backward. Gradients are sent once, all of a rank's in one message; or once for
    each backward.
    """
    strategy, _ = stacked(num_microbatches, anew)
    for rank in range(4):
        elements, count = moved(strategy, rank)
        gathers = 2 * num_microbatches if anew else 1
        layers_gathered = 2 * gathers - (num_microbatches if anew and rank % 2 == 0 else 0)
        assert (elements["unshard"], count["unshard"]) == (layers_gathered * SHARD, layers_gathered)
        sums = num_microbatches if anew else 1
        assert (elements["reduce_scatter"], count["reduce_scatter"]) == (2 * LAYER * sums, sums)


@pytest.mark.parametrize("anew", [exhaustive(False), True])
def test_whole_gradients_that_outlive_their_action(anew):
    """What a rank adds up over microbatches, and what it hands to the optimizer, are whole gradients, or shards."""
    strategy, model = stacked(3, anew)
    step = tf.function(lambda x: strategy.run(lambda x: model.train_step((x, x))["loss"], args=(x,)))
    operations = step.get_concrete_function(tf.ones((12, 6))).graph.get_operations()

    def action(operation):
        return re.search(r"PP/\d(\w)\d|$", operation.name)

    readers = [
        (output, reader)
        for operation in operations
        if action(operation).group(1) == "B"
        for output in operation.outputs
        if output.shape in ((6, 6), (6,))
        for reader in output.consumers()
        if action(reader).group() != action(operation).group()
    ]
    assert len(readers) == (0 if anew else 4 * 4 * 3)  # ranks, parameters of a rank, microbatches


def test_memory():
    """A rank stores half of its stage: of its parameters, their gradients after the step's reduction, and the slots."""
    strategy, model = stacked(2, False)
    for variable in model.trainable_variables:
        stage = int(variable.path.split("dense_")[1][0]) // 2
        assert variable.value.layout.pipe_owners == (stage,)
        shapes = [tuple(part.shape) for part in variable.value.values]
        assert shapes == [(math.prod(variable.shape) // 2,) if rank % 2 == stage else (0,) for rank in range(4)]
    report = tfdist.memory_report(model)
    assert [device.parameter_bytes for device in report.devices] == [4 * 2 * SHARD] * 4
    assert [device.gradient_bytes for device in report.devices] == [4 * 2 * SHARD] * 4


def test_half_precision():
    """Weights travel in half of the bytes, and gradients of microbatches are summed in float32."""
    strategy, model = stacked(2, policy="mixed_bfloat16")
    records = [record for record in strategy.last_plan.records[0] if record.label.startswith("unshard")]
    assert {record.dtype for record in records} <= {"bfloat16", "float16"}
    assert all(record.dtype == "float32" for record in strategy.last_plan.records[0] if record.label.startswith("reduce_scatter"))


def test_saving_and_loading(tmp_path):
    _, model = stacked(2, False)
    model.save_weights(tmp_path / "it.weights.h5")
    again = compiled(strategy_on(4, pipeline_parallel_size=2, zero_stage=3), "plain", num_microbatches=2)
    assert len(again.get_weights()) == 4
    before = model.get_weights()
    model.set_weights([0 * weight for weight in before])
    model.load_weights(tmp_path / "it.weights.h5")
    assert_same_tree(model.get_weights(), before)
    assert data("plain")[0].shape[1] == 7


@pytest.mark.exhaustive
def test_eager_steps_of_data_ranks(exact):
    """Without a pipeline eager ranks feed microbatches, too; in one they would wait for each other."""

    def losses(strategy, **settings):
        model = compiled(strategy, "plain", num_microbatches=2)
        model.run_eagerly = settings.get("run_eagerly", False)
        x, y, _ = data("plain")
        return model.fit(x[:44], y[:44], batch_size=12, shuffle=False, verbose=0).history["loss"], model.get_weights()

    expected = losses(one_device())
    assert_same_tree(losses(strategy_on(2, zero_stage=3), run_eagerly=True), expected)


def loop_that_changes_gradients(strategy, **settings):
    """Gradients of biases are halved, which a shard can be; those of matrices are centred, which takes the whole."""
    model = compiled(strategy, "tied", num_microbatches=2, **settings)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)

    def on_rank(x, y):
        loss, gradients = model.compute_gradients(x, y)
        model.optimizer.apply_gradients(
            [(g - tf.reduce_mean(g) if len(v.shape) == 2 else g / 2, v) for g, v in gradients if g is not None]
        )
        return loss

    step = tf.function(lambda x, y: strategy.reduce("SUM", strategy.run(on_rank, args=(x, y)), axis=None))
    x, y, _ = data("tied")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(24).take(3)
    return [float(step(*batch)) for batch in strategy.experimental_distribute_dataset(dataset)], model.get_weights()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("pipe", "anew"), [(2, True), (1, True), (2, False)])
def test_gradients_that_a_loop_changes(exact, pipe, anew):
    strategy = strategy_on(2 * pipe, pipeline_parallel_size=pipe, zero_stage=3)
    found = loop_that_changes_gradients(strategy, reshard_after_microbatch=anew)
    assert_same_tree(found, loop_that_changes_gradients(one_device()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("anew", [True, False])
def test_gradients_that_a_loop_returns(exact, anew):
    """What ranks return are summands: the caller adds them up."""

    def gradients(strategy, **settings):
        model = compiled(strategy, "plain", num_microbatches=2, **settings)
        model.optimizer.build(model.trainable_variables)
        on_rank = lambda x, y: [tf.convert_to_tensor(g) for g, _ in model.compute_gradients(x, y)[1]]  # noqa: E731
        step = tf.function(lambda x, y: strategy.reduce("SUM", strategy.run(on_rank, args=(x, y)), axis=None))
        x, y, _ = data("plain")
        dataset = tf.data.Dataset.from_tensor_slices((x[:24], y[:24])).batch(24)
        (batch,) = strategy.experimental_distribute_dataset(dataset)
        return [np.asarray(gradient) for gradient in step(*batch)]

    found = gradients(strategy_on(2, zero_stage=3), reshard_after_microbatch=anew)
    assert_same_tree(found, gradients(one_device()))
