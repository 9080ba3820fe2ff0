"""One set of functions per stage: how many operations a step has, that numbers stay, and which stages have none."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from ranks import strategy_on, trace

import tfdist
from tests.extensions.pipeline import pipeline_models
from tests.parity.comparison import assert_same_tree
from tfdist.collectives import point_to_point
from tfdist.extensions.ordering import host_run_ahead
from tfdist.extensions.pipeline.stages import masks, stage_functions
from tfdist.graphs import tape

layers = keras.layers


def step_of(parts, num_microbatches=4, schedule="1f1b", ranks=2, **settings):
    """Returns the graph of a step, and the model."""
    strategy = strategy_on(ranks, pipeline_parallel_size=ranks, zero_stage=0)
    with strategy.scope():
        module = keras.Sequential([keras.Input((5,)), *parts])
        model = tfdist.PipelineModel(module, num_microbatches=num_microbatches, schedule=schedule, **settings)
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
    x = tf.zeros([16, 5])
    return trace(strategy, lambda: model.compute_gradients(x, x)[0]).get_concrete_function().graph, model


def dense_layers(count=4):
    return [layers.Dense(5, "tanh", name=f"dense_{index}") for index in range(count)]


def products(graph):
    """Returns how many products of matrices the step's graph has, and how many its functions have."""
    called = [node.op for function in graph.as_graph_def().library.function for node in function.node_def]
    return sum(operation.type == "MatMul" for operation in graph.get_operations()), called.count("MatMul")


@pytest.mark.parametrize(("schedule", "settings"), [("1f1b", {}), ("zero_bubble", {}), ("1f1b", {"recompute": True})])
def test_a_stage_is_traced_once_whatever_the_microbatches(schedule, settings):
    """Four layers: forward, back for the weights and, but for the first, for the input; forward again to compute again."""
    for count in (2, 4):
        graph, _ = step_of(dense_layers(), count, schedule, **settings)
        assert products(graph) == (0, 4 + 4 + 3 + (4 if settings else 0))


def test_a_microbatch_costs_as_many_operations_whatever_the_layers():
    """But for one addition for each weight's gradient."""

    def of_two_more_microbatches(depth):
        few, many = (len(step_of(dense_layers(depth), count)[0].get_operations()) for count in (2, 4))
        return many - few

    assert of_two_more_microbatches(8) - of_two_more_microbatches(4) == 2 * 4 * 2


class Counting(layers.Layer):
    """Counts its calls, in a variable that is floating."""

    def build(self, shape):
        self.count = self.add_weight(name="count", shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return x


class Looping(layers.Layer):
    def call(self, x):
        return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, tf.tanh(x)), [0, x])[1]


class Printing(layers.Layer):
    def call(self, x):
        tf.print(tf.reduce_sum(x), output_stream="file:///dev/null")
        return x


@pytest.mark.parametrize(
    "layer",
    [layers.ActivityRegularization(0.1), layers.BatchNormalization(), Counting(), Looping(), Printing()],
    ids=lambda layer: type(layer).__name__,
)
def test_stages_that_are_no_functions(layer):
    """They stand in the step once per microbatch; the other stage has its functions."""
    graph, _ = step_of([layers.Dense(5), layer, layers.Dense(5)], stages=[2], num_microbatches=4)
    assert products(graph) == (4 * 2, 1 + 2)


class LossOfItsOwn(layers.Layer):
    def call(self, x):
        self.add_loss(keras.losses.MeanSquaredError()(tf.zeros_like(x), x))
        return x


@pytest.mark.parametrize("ranks", [exhaustive(2), 4])
def test_what_a_layer_adds_of_a_keras_loss_counts_as_in_the_whole_batch(ranks):
    """A layer sees one microbatch of its data rank; the loss that it computes of it is a share of that microbatch's."""
    x = np.random.default_rng(1).normal(size=(16, 5)).astype("float32")
    losses = []
    for wrap in (lambda module: module, lambda module: tfdist.PipelineModel(module, num_microbatches=4, stages=[2])):
        keras.utils.set_random_seed(3)
        with strategy_on(1 if not losses else ranks, pipeline_parallel_size=1 if not losses else 2, zero_stage=0).scope():
            model = wrap(keras.Sequential([keras.Input((5,)), layers.Dense(5), LossOfItsOwn(), layers.Dense(5)]))
            model.compile("sgd", "mse")
        losses.append(model.fit(x, x, batch_size=16, epochs=3, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize("layer", [exhaustive(lambda: layers.BatchNormalization(synchronized=True)), LossOfItsOwn])
def test_a_stage_that_sends_messages_leaves_none_in_the_plan_that_are_not_sent(layer, monkeypatch):
    """Between two data ranks: the trial that finds them is dropped."""
    found = []
    for call in (stage_functions.StageFunctions.call, lambda *_, **__: None):
        monkeypatch.setattr(stage_functions.StageFunctions, "call", call)
        keras.utils.set_random_seed(3)
        strategy = strategy_on(4, pipeline_parallel_size=2, zero_stage=0)
        with strategy.scope():
            module = keras.Sequential([keras.Input((5,)), layers.Dense(5), layer(), layers.Dense(5)])
            model = tfdist.PipelineModel(module, num_microbatches=2, stages=[2])
            model.compile("sgd", "mse")
            model.optimizer.build(model.trainable_variables)
        x = tf.constant(np.random.default_rng(1).normal(size=(16, 5)), tf.float32)
        losses = trace(strategy, lambda model=model, x=x: model.compute_gradients(x, x)[0])()
        found.append([*map(float, strategy.experimental_local_results(losses)), strategy.last_plan.counts()])
    assert found[0][-1] == found[1][-1]
    np.testing.assert_allclose(found[0][:-1], found[1][:-1], rtol=1e-5)


def test_random_numbers_are_no_obstacle():
    graph, _ = step_of([layers.Dense(5), layers.Dropout(0.5), layers.Dense(5)], stages=[2])
    assert products(graph) == (0, 5)


@pytest.mark.parametrize(
    ("name", "pipe", "settings"),
    [
        ("dropout", 2, {"schedule": "zero_bubble"}),
        exhaustive("dropout", 2, {"recompute": True}),
        # All of test_parity.py compares functions with one device.
        exhaustive("branches", 2, {"schedule": "zero_bubble"}),
        exhaustive("masked", 2, {"schedule": "gpipe", "recompute": True}),
        exhaustive("tied", 1, {}),
        # Its first forward in runs, as where gathers pass behind products: two ranks share the parameters of a stage.
        *(exhaustive(name, 2, {"zero_stage": 3}) for name in ("dropout", "branches", "masked", "tied")),
    ],
)
@pytest.mark.usefixtures("float64")
@pytest.mark.as_traced
def test_functions_change_no_number(name, pipe, settings, monkeypatch):
    """Neither losses, weights, slots nor the states of random numbers; of dropout, not a bit of what is drawn."""
    settings = dict(settings)
    zero_stage = settings.pop("zero_stage", 0)
    ranks, runs = (2 * pipe, []) if zero_stage else (pipe, None)
    if zero_stage:
        in_runs = stage_functions._Functions.forward_in_runs
        monkeypatch.setattr(host_run_ahead, "is_limited", lambda _: True)
        monkeypatch.setattr(
            stage_functions._Functions, "forward_in_runs", lambda *given: runs.append(in_runs(*given)) or runs[-1]
        )

    def dropout():
        parts = [layers.Dense(9, "tanh"), layers.Dropout(0.3), layers.Dense(9, "tanh"), layers.Dropout(0.3), layers.Dense(3)]
        return keras.Sequential([keras.Input((7,)), *parts])

    monkeypatch.setitem(pipeline_models.MODELS, "dropout", dropout)
    monkeypatch.setitem(pipeline_models.LOSSES, "dropout", pipeline_models.crossentropy)
    rng = np.random.default_rng(4)
    if name == "dropout":
        monkeypatch.setattr(pipeline_models, "data", lambda _: (rows, classes, None))
        rows, classes = rng.normal(size=(pipeline_models.ROWS, 7)), rng.integers(0, 3, pipeline_models.ROWS)
    results, calls, original = [], [], stage_functions.StageFunctions.call

    def counted(self, *arguments, **settings):
        calls.append(original(self, *arguments, **settings))
        return calls[-1]

    for call in (counted, lambda self, *_, **__: None):
        monkeypatch.setattr(stage_functions.StageFunctions, "call", call)
        strategy = strategy_on(ranks, pipeline_parallel_size=pipe, zero_stage=zero_stage)
        results.append(pipeline_models.train(strategy, name, num_microbatches=4, infers=name == "branches", **settings))
    assert any(call is not None for call in calls)
    assert runs is None or any(len(parts) > 1 for parts in runs)
    assert_same_tree(*results, name)


def test_shapes_that_a_layer_has_set_are_known_outside(monkeypatch):
    """What passes between workers must be of known size."""

    class Vague(layers.Layer):
        def call(self, x):
            y = tf.reshape(x, tf.stack([tf.shape(x)[0], tf.size(x) // tf.shape(x)[0]]))
            y.set_shape(x.shape)
            return y

    sent, original = {}, point_to_point.send_message

    def send(program, x, destination, label):
        sent[label] = x.shape
        original(program, x, destination, label)

    monkeypatch.setattr(point_to_point, "send_message", send)
    graph, _ = step_of([layers.Dense(5), Vague(), layers.Dense(5)], stages=[2])
    assert products(graph)[0] == 0
    assert sent["pipe/0F0/0"].as_list() == [4, 5]


@pytest.mark.parametrize(("rows", "is_dense"), [(100, False), (20, True)])
def test_rows_of_a_table_are_summed_when_they_are_as_many_as_the_tables(rows, is_dense):
    """Of four microbatches with 8 each: the table's size is known outside the function."""
    strategy = strategy_on(2, pipeline_parallel_size=2, zero_stage=0)
    with strategy.scope():
        module = keras.Sequential([keras.Input((2,), dtype="int32"), layers.Embedding(rows, 5), layers.Dense(5)])
        model = tfdist.PipelineModel(module, num_microbatches=4)
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
    found = []

    def step():
        found.append(model.compute_gradients(tf.zeros([16, 2], tf.int32), tf.zeros([16, 2, 5]))[1])

    trace(strategy, step).get_concrete_function()
    (gradient, table), *_ = found[0]
    assert table.shape == (rows, 5)
    assert isinstance(gradient, tf.Tensor) == is_dense


def test_the_gradient_of_the_input_waits_for_none_of_the_weights():
    """Another rank waits for it."""
    graph, _ = step_of(dense_layers(), 2)
    operations = graph.get_operations()
    of_input, *of_weights = (op for op in operations if "PP/1B0/" in op.name and op.type.endswith("PartitionedCall"))
    assert len(of_weights) == 4
    assert not tape.ancestors([of_input], operations).intersection(of_weights)
    assert any(of_input in tape.ancestors([operation], operations) for operation in of_weights)


def test_the_last_layers_weights_have_their_gradients_first():
    """On the first stage, which sends nothing back: what the others are formed of is freed layer by layer."""
    graph, _ = step_of(dense_layers(), 2)
    operations = graph.get_operations()
    calls = [op for op in operations if "PP/0B0/" in op.name and op.type.endswith("PartitionedCall")]
    assert len(calls) == 4
    assert calls[0] in tape.ancestors([calls[-1]], operations)
    assert calls[-1] not in tape.ancestors([calls[0]], operations)


def test_a_layer_that_fails_is_named_with_its_action():
    class Failing(layers.Layer):
        def call(self, x, training=None):
            if training:
                raise ArithmeticError("this layer never works")
            return x

    with pytest.raises(ArithmeticError, match="never works") as caught:
        step_of([layers.Dense(5), Failing(), layers.Dense(5)], stages=[2])
    assert any("0F0" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(("makes", "calls"), [(False, 0), (True, 1)])
def test_masks_are_looked_for_where_a_layer_may_make_one(makes, calls, monkeypatch):
    """That traces the whole model."""
    traced, original = [], tf.function

    def function(body, **settings):
        traced.append(body)
        return original(body, **settings)

    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(11, 8, mask_zero=makes)(tokens)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x)])
    model = tfdist.PipelineModel(keras.Model(tokens, layers.Dense(3)(x)), num_microbatches=2)
    monkeypatch.setattr(masks.tf, "function", function)
    assert isinstance(model._staged.masks, masks.Masks)
    assert len(traced) == calls
