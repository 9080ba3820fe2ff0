"""The picture of the stages shows the messages of a step in the order in which a traced step sends them."""

import importlib.util
import pathlib
import sys

import keras
import pytest
import tensorflow as tf

import tfdist
from tests.devices import names

DOCS = pathlib.Path(__file__).parents[2] / "docs"
WIDTH = 8


@pytest.fixture(scope="module")
def draw_stages():
    spec = importlib.util.spec_from_file_location("draw_stages", DOCS / "draw_stages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def messages(zero_stage, layers):
    """Returns the labels of rank 0's messages in a step of `layers` layers, each a bucket or a group of its own."""
    strategy = tfdist.ShardedStrategy(names(2), zero_stage=zero_stage, bucket_bytes=4 * (WIDTH * WIDTH + WIDTH), group_bytes=0)
    with strategy.scope():
        dense = [keras.layers.Dense(WIDTH, activation="tanh", name=f"layer_{layer}") for layer in range(layers)]
        model = keras.Sequential([keras.Input((WIDTH,)), *dense])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)

    def step_on_rank(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    tf.function(lambda x: strategy.run(step_on_rank, args=(x,)), autograph=False).get_concrete_function(tf.zeros((2, WIDTH)))
    return [record.label for record in strategy.last_plan.records[0]]


def label(task, zero_stage, layers):
    """Returns the label of a task's message in the plan: buckets are numbered as backward fills them."""
    words = {"AR": "all_reduce", "RS": "reduce_scatter", "AG": "unshard" if zero_stage == 3 else "all_gather"}
    place = f"layer_{task.layer}" if zero_stage == 3 else f"bucket_{layers - 1 - task.layer}"
    return f"{words[task.kind]}/{place}" + ("/backward" if task.again else "")


@pytest.mark.parametrize("zero_stage", range(4))
def test_messages_are_in_the_order_of_a_traced_step(draw_stages, zero_stage):
    drawn = [label(task, zero_stage, draw_stages.LAYERS) for task in draw_stages.STEPS[zero_stage].messages]
    assert drawn == messages(zero_stage, draw_stages.LAYERS)


def test_lanes_do_not_overlap(draw_stages):
    for step in draw_stages.STEPS:
        begins = draw_stages.times(step)
        for lane in (step.computation, step.messages):
            assert len({task.name for task in lane}) == len(lane)
            for before, after in zip(lane, lane[1:], strict=False):
                assert begins[before.name] + draw_stages.DURATIONS[before.kind] <= begins[after.name]


def test_it_is_drawn(draw_stages, tmp_path):
    draw_stages.draw(tmp_path / "stages.png")
    assert (tmp_path / "stages.png").stat().st_size > 10_000
