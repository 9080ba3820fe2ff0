"""Steps of a model on symbols, the private names that this stands on, and that the model stays as it was."""

import threading

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras.src.layers import layer as keras_layer
from plan_models import RawOps, chain, decoder, example_gpt, new_decoder, subclassed, with_raw_ops

import tfdist
from tests.devices import names
from tfdist.extensions.tensor.plans import keras_tracing, trace_model
from tfdist.sharding import layers_within


def steps(model, *names, training=True, index=0):
    """Returns the steps of the trace by the names of their operations; for the layers of interest, only those in `names`."""
    return [event for event in trace_model(model).traces[index].events if event.operation.name in names or not names]


# The private names


def test_node_records_the_calls_of_layers():
    """The one name of `keras.src`: without it no call is recorded on a layer."""
    dense = layers.Dense(3)
    dense(keras.KerasTensor((2, 4)))
    assert len(dense._inbound_nodes) == 1
    assert callable(keras_layer.Node)


def test_symbolic_call_is_what_symbols_go_through(monkeypatch):
    called = []
    for owner in (keras.Operation, keras.Layer):
        original = owner.symbolic_call

        def method(self, *args, original=original, **kwargs):
            called.append(type(self).__name__)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, "symbolic_call", method)
    x = layers.Dense(3)(keras.KerasTensor((2, 4)))
    x = ops.relu(x) + 1.0
    keras.activations.relu(x, max_value=3.0)
    assert called == ["Dense", "Relu", "Add", "ReLU"]


def test_reads_of_variables_go_through_the_scope(monkeypatch):
    read = []
    original = keras.StatelessScope.get_current_value
    monkeypatch.setattr(
        keras.StatelessScope, "get_current_value", lambda self, variable: read.append(variable) or original(self, variable)
    )
    variable = keras.Variable(np.ones(3, "float32"))
    with keras.StatelessScope():
        ops.transpose(variable)
    assert any(found is variable for found in read)


# The trace


def test_nested_layers_are_followed():
    names = [event.operation.name for event in steps(decoder())]
    order = ["token", "position", "attention_norm", "attention", "mlp_norm", "gate", "up", "dropout", "down"]
    places = [next(i for i, name in enumerate(names) if name.startswith(wanted)) for wanted in order]
    assert places == sorted(places)
    assert names.count("attention") == names.count("gate") == 2


def test_calls_on_what_is_computed_at_once_are_seen():
    (event,) = steps(decoder(), "position")
    assert event.inputs[0].shape == (8,) and event.outputs[0].shape == (8, 16)


def test_training_and_inference_may_differ():
    def call(made, x, training):
        return made[0](x) if training else made[1](x)

    a, b = layers.Dense(3, name="a"), layers.Dense(3, name="b")
    a.build((2, 4))
    model = subclassed(call, a, b, example=ops.ones((2, 4)), training=True)
    assert [event.operation.name for event in steps(model)] == ["a"]
    assert [event.operation.name for event in steps(model, index=1)] == ["b"]


def test_a_layer_that_takes_no_symbols_is_one_step():
    trace = trace_model(with_raw_ops()).traces[0]
    assert [type(layer) for layer, _ in trace.opaque] == [RawOps]
    assert [layer.name for layer in trace.hidden] == ["first", "second"]
    assert [given[1:] for given, _ in trace.hidden.values()] == [(8,), (16,)]
    assert [event.operation.name for event in trace.events if isinstance(event.operation, keras.Layer)] == ["raw", "up", "down"]


def test_a_symbol_from_nowhere_makes_a_step_opaque():
    def call(made, x):
        y = made[0](x)
        return made[1](keras.KerasTensor(y.shape) if isinstance(y, keras.KerasTensor) else y)

    graph = trace_model(subclassed(call, layers.Dense(3, name="a"), layers.Dense(3, name="b"), example=ops.ones((2, 4))))
    assert [reason for _, reason in graph.traces[0].opaque] == ["RuntimeError: a step of it leaves no trace on symbols"]
    assert not any(known.is_traced for known in graph.layers)


def test_calls_within_an_operation_are_hidden():
    def call(made, x):
        return made[0](x) + ops.vectorized_map(made[0], x)

    graph = trace_model(subclassed(call, layers.Dense(4, name="a"), example=ops.ones((2, 5, 4))))
    (known,) = graph.layers
    assert not known.is_traced


def test_gradients_flow_back_through_weights_only():
    x = keras.Input((4,))
    y = ops.stop_gradient(layers.Dense(4, name="a")(ops.relu(x)))
    trace = trace_model(keras.Model(x, layers.Dense(4, name="b")(y))).traces[0]
    needs = [event.inputs[0] in trace.needs_gradient for event in trace.events if isinstance(event.operation, layers.Dense)]
    assert needs == [False, False]
    trace = trace_model(chain(4, 4, 4)).traces[0]
    needs = [event.inputs[0] in trace.needs_gradient for event in trace.events if isinstance(event.operation, layers.Dense)]
    assert needs == [False, True, True]


def test_weights_that_are_read_elsewhere():
    def tied(made, x):
        embedding, dense = made
        return ops.matmul(dense(embedding(x)), ops.transpose(embedding.embeddings))

    def as_argument(made, x):
        embedding, dense = made
        return ops.einsum("bsd,vd->bsv", dense(embedding(x)), embedding.embeddings)

    for call in (tied, as_argument):
        model = subclassed(call, layers.Embedding(9, 4, name="e"), layers.Dense(4, name="d"), example=ops.ones((2, 3), "int32"))
        assert [layer.name for layer in trace_model(model).traces[0].foreign_reads] == ["e"]


# The model


def state(model):
    found = layers_within(model)
    nodes = [(len(layer._inbound_nodes), len(layer._outbound_nodes)) for layer in found]
    return nodes, [ops.convert_to_numpy(variable) for variable in model.variables], list(model.losses)


@pytest.mark.parametrize("make", [decoder, example_gpt, with_raw_ops])
def test_the_model_stays_as_it_was(make):
    model = make()
    names = [variable.path for variable in model.variables]
    nodes, values, losses = state(model)
    trace_model(model)
    after = state(model)
    assert nodes == after[0] and losses == after[2]
    for before, now in zip(values, after[1], strict=True):
        np.testing.assert_array_equal(before, now)
    assert [variable.path for variable in model.variables] == names


def test_keras_is_put_back_after_an_error():
    before = keras.Layer.__call__, keras.Layer.symbolic_call, keras.Operation.symbolic_call, keras_layer.Node
    model = chain(4)
    with pytest.raises(Exception, match="incompatible|expected"):
        keras_tracing.trace(model, model.layers, ((keras.KerasTensor((2, 99)),), {}), training=False)
    assert before == (keras.Layer.__call__, keras.Layer.symbolic_call, keras.Operation.symbolic_call, keras_layer.Node)


def test_other_threads_are_not_recorded():
    """A model that is built meanwhile keeps its nodes."""
    made = []

    def call(self, x):
        thread = threading.Thread(target=lambda: made.append(layers.Dense(2)(keras.Input((3,)))))
        thread.start()
        thread.join()
        return x

    class Meanwhile(layers.Layer):
        def call(self, x):
            return call(self, x)

    model = keras.Sequential([keras.Input((4,)), Meanwhile(), layers.Dense(3)])
    made.clear()
    trace_model(model)
    assert len(made) == 2  # with and without training
    assert all(keras.Model(y._keras_history.operation.input, y).count_params() == 8 for y in made)


def test_models_of_a_strategy():
    strategy = tfdist.ShardedStrategy(names(2), zero_stage=3)
    with strategy.scope():
        model = new_decoder()
        within = trace_model(model)
    outside = trace_model(model)
    paths = [known.path for known in trace_model(decoder()).layers]
    assert [known.path for known in within.layers] == [known.path for known in outside.layers] == paths
    assert all(known.is_traced and known.obstacle is None for known in within.layers + outside.layers)
