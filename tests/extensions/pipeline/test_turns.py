"""What of a step takes memory only when its turn has come: receives, sums of an embedding's rows, weight decay."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import local, strategy_on, trace

import tfdist
from tfdist.collectives import point_to_point
from tfdist.extensions.pipeline.gradients import GradientSum


def dense_layers(count=4):
    return [keras.layers.Dense(5, "tanh", name=f"dense_{index}") for index in range(count)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_receive_is_posted_one_action_ahead(schedule, monkeypatch):
    """Between workers its tensor exists from then on: all of a step's would at the step's begin."""
    waits, original = {}, point_to_point.receive_message

    def receive(program, spec, rows, source, label):
        waits[program.rank, label] = [op.name for op in tf.no_op().control_inputs]
        return original(program, spec, rows, source, label)

    monkeypatch.setattr(point_to_point, "receive_message", receive)
    strategy = strategy_on(2, pipeline_parallel_size=2, zero_stage=0)
    with strategy.scope():
        model = tfdist.PipelineModel(
            keras.Sequential([keras.Input((5,)), *dense_layers()]), num_microbatches=4, schedule=schedule, stages=["dense_2"]
        )
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
    trace(strategy, lambda: model.compute_gradients(tf.zeros([8, 5]), tf.zeros([8, 5]))[0])()
    actions = {rank: [str(action) for action in model.schedule.actions(rank)] for rank in range(2)}
    assert len(waits) == 8  # 4 forward, 4 back
    for (rank, label), found in waits.items():
        source, phase, number = re.fullmatch(r"pipe/(\d)([FB])(\d)/0", label).groups()
        taker = f"{1 - int(source)}{phase}{number}"
        place = actions[rank].index(taker)
        expected = [] if place < 2 else [actions[rank][place - 2]]
        assert [name.split("PP/")[1].split("/")[0] for name in found] == expected


@pytest.mark.parametrize(("rows", "table", "is_dense"), [(3, 10, False), (5, 10, True), (3, None, False)])
def test_rows_are_summed_when_they_are_as_many_as_the_tables(rows, table, is_dense):
    """Of two microbatches; a table of unknown size keeps rows."""
    variable = object()
    rng = np.random.default_rng(2)
    values, indices = rng.normal(size=(2, rows, 4)).astype("float32"), rng.integers(0, 10, size=(2, rows))

    @tf.function
    def total(size):
        sums = GradientSum()
        for part in range(2):
            shape = tf.stack([size, 4]) if table is None else tf.constant([table, 4])
            sums.add([variable], [tf.IndexedSlices(values[part], indices[part], shape)])
        found = sums.of(variable)
        assert isinstance(found, tf.IndexedSlices) != is_dense
        return tf.convert_to_tensor(found)

    expected = np.zeros((10, 4))
    np.add.at(expected, indices.ravel(), values.reshape(-1, 4))
    np.testing.assert_allclose(total(tf.constant(10)), expected, rtol=1e-5, atol=1e-6)


def test_weight_decay_waits_for_the_gradient():
    strategy = strategy_on(2, zero_stage=0)
    with strategy.scope():
        weight = keras.Variable(np.ones((3, 5), "float32"), name="weight")
        optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
        optimizer.build([weight])

    def step():
        gradient = tf.identity(tf.ones([3, 5]), name="the_gradient")
        optimizer.apply([gradient], [weight])
        return tf.convert_to_tensor(weight)

    traced = trace(strategy, step)
    local(strategy, traced())
    operations = traced.get_concrete_function().graph.get_operations()
    products = [op for op in operations if op.type == "Mul" and op.outputs[0].shape in ((3, 5), (15,))]
    assert products
    for op in products:
        assert any("the_gradient" in ancestor.name for ancestor in ancestors(op)), op.name


def ancestors(operation):
    found, waiting = set(), [operation]
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
    return found
