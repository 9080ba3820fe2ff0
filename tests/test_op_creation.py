"""The short cuts of tests/op_creation.py change no graph, and TensorFlow still goes their way."""

import keras
import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import auto_control_deps
from training import small, strategy_for, vectors

from tests import op_creation


def graph_of_a_step():
    keras.backend.clear_session()
    strategy = strategy_for(2, 3)
    with strategy.scope():
        model = small()
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
    dataset = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(vectors()).batch(4)))

    def rank_step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch[0]) ** 2)
        tf.cond(loss > 0, lambda: optimizer.iterations.assign_add(0), lambda: optimizer.iterations.assign_add(1))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    @tf.function
    def step(batches):
        strategy.run(rank_step, args=(next(batches),))

    return step.get_concrete_function(dataset).graph


def edges_of(graph):
    return {node.name: sorted(node.input) for node in graph.as_graph_def().node}


def test_resources_are_those_that_tensorflow_finds(monkeypatch):
    short, calls = edges_of(graph_of_a_step()), []
    monkeypatch.setattr(
        auto_control_deps, "_get_resource_inputs", lambda operation: calls.append(0) or op_creation._resources_of(operation)
    )
    assert edges_of(graph_of_a_step()) == short
    assert len(calls) >= len(short)  # that is where TensorFlow asks
    assert any(name.startswith("^") for inputs in short.values() for name in inputs)


def test_no_operation_has_a_stack(monkeypatch):
    set_on = []
    monkeypatch.setattr(pywrap_tf_session, "TF_SetOpStackTrace", lambda operation, stack: set_on.append(stack))
    graph = graph_of_a_step()
    assert len(set_on) >= len(graph.get_operations())  # that is where TensorFlow attaches it
    assert set(set_on) == {None}
