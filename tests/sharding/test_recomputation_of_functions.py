"""A function is computed again after what backward begins with, and backward reads what is made again."""

import numpy as np
import tensorflow as tf
from ranks import run, strategy_on

from tfdist.collectives import current_program
from tfdist.sharding.recomputation import Recomputation

X = [np.array([0.5, -1.0, 2.0], np.float32)] * 2


def on_rank(function):
    """Returns a rank's function: the gradient of `sum(function(x) ** 2)`, of a function that is computed again, and its kinds."""
    kinds = []

    def step(x):
        state = current_program("test").part(Recomputation)
        with tf.GradientTape() as tape:
            tape.watch(x)
            before = len(x.graph.get_operations())
            y = state.call(function, (x,), {})
            loss = tf.reduce_sum(y**2)
        grad = tape.gradient(loss, x)
        state.connect()
        kinds.append((x.graph.get_operations()[before:], state.idle))
        return grad, y

    return step, kinds


def test_operations_of_backward_read_those_made_again():
    step, kinds = on_rank(lambda x: tf.tanh(tf.sin(x)) * 3.0)
    for grad, y in run(strategy_on(2), step, X):
        t = np.tanh(np.sin(X[0]))
        np.testing.assert_allclose(grad, 2 * y * 3 * (1 - t**2) * np.cos(X[0]), rtol=1e-5)
    operations, idle = kinds[0]
    first, second = [op for op in operations if op.type == "Tanh"]
    assert {reader.type for reader in first.outputs[0].consumers()} == {"Mul"}, "the function's own product"
    assert "TanhGrad" in {reader.type for reader in second.outputs[0].consumers()}
    assert second.name not in idle and len([op for op in operations if op.type == "Sin"]) == 2


def test_the_last_product_is_idle():
    """Nobody reads what the function has returned, made again."""
    step, kinds = on_rank(lambda x: tf.tanh(x) * 3.0)
    run(strategy_on(2), step, X)
    operations, idle = kinds[0]
    assert {op.type for op in operations if op.name in idle} >= {"Mul"}
    assert not any(op.name in idle for op in operations if op.type == "Tanh")


def test_what_is_left_alone_is_not_made_again():
    def function(x):
        made = tf.sin(x)
        current_program("test").part(Recomputation).leave_alone([made.op])
        return tf.tanh(made) * 3.0

    step, kinds = on_rank(function)
    run(strategy_on(2), step, X)
    operations, _ = kinds[0]
    assert [op.type for op in operations].count("Sin") == 1 and [op.type for op in operations].count("Tanh") == 2


def test_without_a_tape_it_is_a_call():
    def step(x):
        before = len(x.graph.get_operations())
        y, rest = current_program("test").part(Recomputation).call(lambda x, k: (tf.tanh(x) * k, "text"), (x,), {"k": 2.0})
        assert rest == "text" and not any(op.type == "Identity" for op in x.graph.get_operations()[before:])
        return y

    np.testing.assert_allclose(run(strategy_on(2), step, X), [np.tanh(X[0]) * 2] * 2, rtol=1e-6)


def test_it_waits_for_what_backward_begins_with():
    """And the region before it for the readers of the region after: else both would be held."""

    def step(x):
        state = current_program("test").part(Recomputation)
        with tf.GradientTape() as tape:
            weight = tf.stack([1.0, 2.0, 3.0])
            tape.watch([x, weight])
            y = state.call(lambda x: tf.tanh(x) * 3.0, (x,), {})
            z = state.call(lambda y: tf.sigmoid(y) * weight, (y,), {})
            loss = tf.reduce_sum(z**2)
        grads = tape.gradient(loss, [x, weight])
        state.connect()
        operations = x.graph.get_operations()
        again = {kind: [op for op in operations if op.type == kind][1] for kind in ("Tanh", "Sigmoid")}
        [gate] = again["Sigmoid"].control_inputs
        assert gate.type == "NoOp" and gate.control_inputs
        [gate] = again["Tanh"].control_inputs
        readers = set(again["Sigmoid"].outputs[0].consumers())
        of_weight = {op for op in readers if op.type == "Mul" and op.name not in state.idle}
        assert of_weight and of_weight <= set(gate.control_inputs)
        return grads

    run(strategy_on(1), step, X[:1])
